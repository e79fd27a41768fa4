//! The limits of requests.

use super::Session;
use crate::error::{self, RequestError};
use galaxy_common::Bytes;
use std::time::Duration;

/// How many texts one request may have; the SDK sends more in parts.
pub const MAX_TEXTS: usize = 1024;
/// How many bytes of results one request may ask for.
pub const MAX_RESULT_BYTES: u64 = 512 << 20;

/// What a session grants to requests and clients.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// How many requests may wait while one runs.
    pub queue: usize,
    /// The time limit of a request that sets none.
    pub timeout: Duration,
    /// How much of this process's memory one client may hold.
    pub client_memory: Bytes,
    /// Whether drafts are verified where that pays (speculative decoding).
    pub drafts: bool,
}

impl Session {
    /// The most tokens of a text, and what limits them; `by_files` is the limit by the model's files, if they say one.
    pub(super) fn text_limit(&self, by_files: Option<(u32, &'static str)>) -> (u32, &'static str) {
        let limits = [
            (self.spec().position_limit(), self.spec().limited_by()),
            (self.fleet_status().max_rows, error::MAX_ROWS),
            by_files.unwrap_or((u32::MAX, "nothing")),
        ];
        limits.into_iter().min_by_key(|(limit, _)| *limit).expect("the array has three elements")
    }

    /// Checks token ids that a caller gave.
    pub(super) fn check_ids(
        &self,
        index: usize,
        ids: &[u32],
        (limit, limited_by): (u32, &'static str),
    ) -> Result<(), RequestError> {
        if self.spec().patches.is_some() {
            let why = format!("sequence {index} has ids, and this model reads images");
            return Err(RequestError::Invalid { why });
        }
        if ids.is_empty() {
            return Err(RequestError::Invalid { why: format!("sequence {index} has no ids") });
        }
        if ids.len() > limit as usize {
            let (what, tokens) = (format!("sequence {index}"), ids.len());
            return Err(RequestError::TooLong { what, tokens, limit, limited_by });
        }
        self.check_known(index, ids)
    }

    /// Checks that the vocabulary has all of a text's tokens.
    pub(super) fn check_known(&self, index: usize, ids: &[u32]) -> Result<(), RequestError> {
        let vocabulary = self.spec().vocabulary;
        match ids.iter().find(|&&id| id >= vocabulary) {
            Some(&token) => Err(RequestError::UnknownToken { index, token, vocabulary }),
            None => Ok(()),
        }
    }
}

/// Checks how many items a request has.
pub(super) fn check_count(count: usize, what: &'static str) -> Result<(), RequestError> {
    match count {
        0 => Err(RequestError::Nothing { what }),
        1..=MAX_TEXTS => Ok(()),
        _ => Err(RequestError::TooManyTexts { texts: count, limit: MAX_TEXTS }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_with_no_texts_or_too_many_are_refused() {
        assert_eq!(check_count(0, "texts"), Err(RequestError::Nothing { what: "texts" }));
        assert!(check_count(1024, "texts").is_ok());
        let error = check_count(10_000, "texts").expect_err("too many").to_string();
        assert!(error.contains("10000") && error.contains("1024") && error.contains("parts"));
    }
}
