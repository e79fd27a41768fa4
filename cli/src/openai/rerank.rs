//! Requests to cross-encoders, as Cohere's and Jina's APIs have them.

use super::{
    body::{Field, Object, parse},
    error::ApiError,
};
use galaxy_client::Ranking;
use serde_json::{Value, json};

/// The body of `POST /v1/rerank`.
#[derive(Debug)]
pub struct RerankRequest {
    /// The query that documents are ranked by.
    pub query: String,
    /// The texts to rank, at least one.
    pub documents: Vec<String>,
    /// The model that is asked for, if any is.
    pub model: Option<String>,
    /// Whether texts that are too long are cut instead of refused.
    pub truncate: bool,
    /// How many of the best documents the answer has; all if absent.
    top: Option<u32>,
    /// Whether results have the texts of documents, too.
    texts: bool,
}

impl RerankRequest {
    /// Reads the body of a request.
    ///
    /// # Errors
    /// When it cannot be answered.
    pub fn read(body: &[u8]) -> Result<Self, ApiError> {
        let map = parse(body)?;
        let request = Object::new(&map);
        let (query, documents) = (request.get("query"), request.get("documents"));
        let takes = "a list of at least one text";
        let list = documents.list(takes)?.ok_or_else(|| documents.wrong(takes))?;
        let texts: Vec<String> = list.map(|field| text(&field)).collect::<Result<_, _>>()?;
        if texts.is_empty() {
            return Err(documents.wrong(takes));
        }
        Ok(Self {
            query: query.text()?.ok_or_else(|| query.wrong("a text"))?.to_owned(),
            documents: texts,
            model: request.get("model").text()?.map(str::to_owned),
            truncate: request.get("truncate").flag()?.unwrap_or(false),
            top: request.get("top_n").count(1)?,
            texts: request.get("return_documents").flag()?.unwrap_or(false),
        })
    }

    /// The answer as JSON: `{"results": [{"index": 1, "relevance_score": 0.9}], ...}`, the best
    /// first.
    pub fn answer(&self, model: &str, ranking: &Ranking) -> Value {
        let most = self.top.map_or(usize::MAX, |top| top as usize);
        let results = ranking.ranked.iter().take(most).map(|ranked| {
            let mut result = json!({ "index": ranked.index, "relevance_score": ranked.score });
            if let Some(text) = self.documents.get(ranked.index).filter(|_| self.texts) {
                result["document"] = json!({ "text": text });
            }
            result
        });
        let results: Vec<Value> = results.collect();
        let usage = json!({ "total_tokens": ranking.report.tokens });
        json!({ "model": model, "results": results, "usage": usage })
    }
}

/// A document: a text, or an object that has it.
fn text(field: &Field<'_>) -> Result<String, ApiError> {
    let takes = "a text, or an object with text";
    if let Some(Value::String(text)) = field.value() {
        return Ok(text.clone());
    }
    let inner = field.object(takes)?.ok_or_else(|| field.wrong(takes))?.get("text");
    Ok(inner.text()?.ok_or_else(|| inner.wrong("a text"))?.to_owned())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use galaxy_client::{Ranked, Report};

    #[test]
    fn top_n_and_return_documents_shape_the_rerank_answer() {
        let read = |more: &str| {
            let body = format!(r#"{{"query": "q", "documents": ["a", {{"text": "b"}}]{more}}}"#);
            RerankRequest::read(body.as_bytes())
        };
        let ranked = vec![Ranked { index: 1, score: 0.5 }, Ranked { index: 0, score: 0.25 }];
        let ranking = Ranking { ranked, report: Report::default() };
        let answer = read("").unwrap().answer("m", &ranking);
        let want = json!([{ "index": 1, "relevance_score": 0.5 }, { "index": 0, "relevance_score": 0.25 }]);
        assert_eq!(answer["results"], want);
        let request = read(r#", "top_n": 1, "return_documents": true, "model": null"#).unwrap();
        let want = json!([{ "index": 1, "relevance_score": 0.5, "document": { "text": "b" } }]);
        assert_eq!(request.answer("m", &ranking)["results"], want);
        assert!(read(r#", "top_n": null, "truncate": null, "return_documents": null"#).is_ok());
    }

    #[test]
    fn errors_in_rerank_requests_name_the_field() {
        for (body, param) in [
            (r#"{"documents": ["a"]}"#, "query"),
            (r#"{"query": "q"}"#, "documents"),
            (r#"{"query": "q", "documents": []}"#, "documents"),
            (r#"{"query": "q", "documents": ["a", 5]}"#, "documents[1]"),
            (r#"{"query": "q", "documents": [{"text": 5}]}"#, "documents[0].text"),
            (r#"{"query": "q", "documents": ["a"], "top_n": 0}"#, "top_n"),
        ] {
            let error = RerankRequest::read(body.as_bytes()).expect_err(body);
            assert_eq!(error.param.as_deref(), Some(param), "{}", error.message);
        }
    }
}
