//! Errors as OpenAI's API has them.

use axum::{
    body::Body,
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use galaxy_client::ClientError;
use serde_json::{Value, json};

/// Seconds after which a request that may succeed later is worth another try.
const RETRY: &str = "1";

/// Settings that the coordinator checks against the model, as its messages begin with them.
const SETTINGS: [&str; 2] = ["logit_bias", "stop"];

/// Why a request has no answer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ApiError {
    pub status: StatusCode,
    /// A stable name of the reason.
    pub code: String,
    pub message: String,
    /// The field of the request that is at fault, if one is.
    pub param: Option<String>,
    retryable: bool,
}

impl ApiError {
    pub fn new(status: StatusCode, code: &str, message: impl Into<String>) -> Self {
        let (code, message) = (code.to_owned(), message.into());
        Self { status, code, message, param: None, retryable: false }
    }

    /// The error of a request that is at fault.
    pub fn bad(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_argument", message)
    }

    /// The error of a request for what is not supported.
    pub fn unsupported(what: &str) -> Self {
        let message = format!("{what} is not supported; leave it out");
        Self::new(StatusCode::BAD_REQUEST, "unsupported", message)
    }

    /// Names the field of the request that is at fault.
    pub fn of(self, param: impl Into<String>) -> Self {
        Self { param: Some(param.into()), ..self }
    }

    /// Names the field at fault in an error of the coordinator: `field` for texts, or the setting
    /// that the message begins with.
    pub fn about(self, field: &str) -> Self {
        match self.code.as_str() {
            "text_too_long" | "empty_text" | "unknown_token" | "too_many_texts" => self.of(field),
            "invalid_argument" => {
                let named = SETTINGS.into_iter().find(|setting| self.message.starts_with(setting));
                Self { param: named.map(str::to_owned).or(self.param), ..self }
            }
            _ => self,
        }
    }

    /// The error as JSON, for a body or for an event of a stream.
    pub fn body(&self) -> Value {
        let kind = match self.status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            status if status.is_client_error() => "invalid_request_error",
            _ => "server_error",
        };
        let Self { code, message, param, .. } = self;
        json!({ "error": { "message": message, "type": kind, "param": param, "code": code } })
    }
}

impl From<ClientError> for ApiError {
    fn from(error: ClientError) -> Self {
        let status = match error.code() {
            "invalid_argument" | "empty_text" | "text_too_long" | "too_many_texts"
            | "result_too_large" | "unknown_token" | "unsupported_output" | "unsupported_model"
            | "out_of_range" => StatusCode::BAD_REQUEST,
            "request_too_large" => StatusCode::PAYLOAD_TOO_LARGE,
            "overloaded" | "client_memory" => StatusCode::TOO_MANY_REQUESTS,
            "deadline" | "deadline_exceeded" => StatusCode::GATEWAY_TIMEOUT,
            "internal" | "malformed_answer" => StatusCode::BAD_GATEWAY,
            _ => StatusCode::SERVICE_UNAVAILABLE,
        };
        let retryable = error.retryable();
        Self { retryable, ..Self::new(status, error.code(), error.to_string()) }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = answer(self.status, &self.body());
        if self.retryable {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static(RETRY));
        }
        response
    }
}

/// A response of one JSON value.
pub fn answer(status: StatusCode, value: &impl serde::Serialize) -> Response {
    let bytes = serde_json::to_vec(value).unwrap_or_default();
    let mut response = Response::new(Body::from(bytes));
    *response.status_mut() = status;
    let json = HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, json);
    response
}
