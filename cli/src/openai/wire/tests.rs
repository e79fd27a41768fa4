#![allow(clippy::unwrap_used)]

use super::*;

fn completion(text: &str) -> Result<CompletionRequest, ApiError> {
    CompletionRequest::read(text.as_bytes())
}

fn chat(more: &str) -> Result<ChatRequest, ApiError> {
    let body = format!(r#"{{"messages": [{{"role": "user", "content": "hi"}}]{more}}}"#);
    ChatRequest::read(body.as_bytes())
}

fn fallback(max_tokens: u32) -> GenerateOptions {
    let fallback = Some(Fallback { temperature: 1.0, max_tokens });
    GenerateOptions { fallback, ..GenerateOptions::default() }
}

#[test]
fn omitted_options_stay_unset_with_the_fallbacks_of_the_api() {
    let request = completion(r#"{"prompt": "a", "user": "who", "model": "m"}"#).unwrap();
    assert_eq!(request.prompts, ["a".into()]);
    assert_eq!(request.choice.options, fallback(16));
    let none = request.choice.options.without_model_defaults();
    assert_eq!((none.sampling.temperature, none.max_tokens), (Some(1.0), 16));
    let request = chat("").unwrap();
    assert_eq!(request.choice.options, fallback(0));
    assert!(!request.choice.usage && !request.choice.stream);
}

#[test]
fn every_option_of_a_completion_request_is_read() {
    let text = r#"{
            "prompt": [[1, 2], [3]], "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "top_k": -1, "min_p": 0.1,
            "presence_penalty": -1, "frequency_penalty": 0.25, "repetition_penalty": 1.5, "seed": -1,
            "logit_bias": {"10": -100, "9": 5.5}, "stop": ["x", "y"], "ignore_eos": true, "logprobs": null, "priority": -2,
            "stream": true, "stream_options": {"include_usage": true}
        }"#;
    let CompletionRequest { prompts, choice } = completion(text).unwrap();
    assert!(choice.usage && choice.stream);
    assert_eq!(prompts, [Prompt::Ids(vec![1, 2]), Prompt::Ids(vec![3])]);
    let sampling = SamplingParams {
        temperature: Some(0.5),
        top_k: Some(0),
        top_p: Some(0.9),
        min_p: Some(0.1),
        repetition: Some(1.5),
        presence: Some(-1.0),
        frequency: Some(0.25),
        bias: vec![(9, 5.5), (10, -100.0)],
        seed: Some(u64::MAX),
        logprobs: 0,
    };
    let stop = vec!["x".to_owned(), "y".to_owned()];
    let (ignore_end, priority) = (true, -2);
    let want =
        GenerateOptions { max_tokens: 5, sampling, stop, ignore_end, priority, ..fallback(16) };
    assert_eq!(choice.options, want);
}

/// Every optional field, of all routes.
const OPTIONAL: &[&str] = &[
    "model",
    "stream",
    "stream_options",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
    "stop",
    "ignore_eos",
    "return_token_ids",
    "priority",
    "chat_template_kwargs",
    "encoding_format",
    "dimensions",
    "truncate",
    "user",
    "metadata",
    "parallel_tool_calls",
    "store",
    "service_tier",
];

#[test]
fn null_means_absent() {
    let names = OPTIONAL.iter().copied().chain(NOT_DONE.iter().map(|row| row.0));
    let nulls: String = names.map(|name| format!(", {name:?}: null")).collect();
    let request = completion(&format!(r#"{{"prompt": "a"{nulls}}}"#)).unwrap();
    assert_eq!(request.choice.options, fallback(16));
    assert_eq!(chat(&nulls).unwrap().choice.options, fallback(0));
    let request = EmbeddingRequest::read(format!(r#"{{"input": "a"{nulls}}}"#).as_bytes()).unwrap();
    assert_eq!(
        (request.model, request.dimensions, request.truncate, request.base64),
        (None, None, false, false)
    );
    assert!(
        chat(r#", "stream_options": {"include_usage": null}, "logit_bias": {"5": null}"#).is_ok()
    );
    let message = r#"{"messages": [{"role": "assistant", "content": null, "name": null, "tool_calls": null,
            "tool_call_id": null, "refusal": null, "audio": null}]}"#;
    ChatRequest::read(message.as_bytes()).unwrap();
}

#[test]
fn unsupported_options_are_accepted_at_their_neutral_values() {
    for (name, values, _) in NOT_DONE {
        for value in *values {
            let more = format!(", {name:?}: {value}");
            assert_eq!(chat(&more).unwrap().choice.options, fallback(0), "{more}");
            assert!(completion(&format!(r#"{{"prompt": "a"{more}}}"#)).is_ok(), "{more}");
        }
    }
    let nothing = r#", "presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}, "stop": [], "n": 1.0,
            "parallel_tool_calls": false, "user": "u", "metadata": {"a": "b"}, "store": false,
            "service_tier": "auto", "stream_options": {"include_usage": false}, "chat_template_kwargs": {}"#;
    assert!(chat(nothing).is_ok());
}

#[test]
fn unsupported_or_invalid_options_are_refused_by_name() {
    for (text, param, says) in [
        (r#"{"prompt": "a", "n": 2}"#, "n", "n = 2 is not supported: one choice"),
        (r#"{"prompt": "a", "n": 0}"#, "n", "n = 0 is not supported"),
        (r#"{"prompt": "a", "best_of": 2}"#, "best_of", "one choice"),
        (r#"{"prompt": "a", "echo": true}"#, "echo", "not repeated"),
        (r#"{"prompt": "a", "logprobs": 1}"#, "logprobs", "log-probabilities"),
        (r#"{"prompt": "a", "suffix": "b"}"#, "suffix", "suffix = \"b\" is not supported"),
        (r#"{"prompt": "a", "tools": [{}]}"#, "tools", "not called"),
        (r#"{"prompt": "a", "tool_choice": "required"}"#, "tool_choice", "\"required\""),
        (
            r#"{"prompt": "a", "response_format": {"type": "json_object"}}"#,
            "response_format",
            "no format",
        ),
        (r#"{"prompt": "a", "guided_json": {"type": "object"}}"#, "guided_json", "no format"),
        (r#"{"prompt": "a", "max_tokens": 0}"#, "max_tokens", "at least 1, not the number 0"),
        (
            r#"{"prompt": "a", "max_tokens": -1}"#,
            "max_tokens",
            "max_tokens must be a whole number of at least 1",
        ),
        (r#"{"prompt": "a", "max_tokens": 8.0}"#, "max_tokens", "not the number 8.0"),
        (r#"{"prompt": "a", "top_k": -2}"#, "top_k", "at least -1"),
        (
            r#"{"prompt": "a", "temperature": "0.5"}"#,
            "temperature",
            "a number, not the text \"0.5\"",
        ),
        (
            r#"{"prompt": "a", "temperature": -1}"#,
            "temperature",
            "temperature must be 0 to 100, not -1",
        ),
        (r#"{"prompt": "a", "top_p": 1.5}"#, "top_p", "0 to 1"),
        (r#"{"prompt": "a", "priority": 0.5}"#, "priority", "whole number"),
        (r#"{"prompt": "a", "repetition_penalty": 0}"#, "repetition_penalty", "0.01 to 100"),
        (r#"{"prompt": "a", "seed": 1.5}"#, "seed", "64 bits"),
        (r#"{"prompt": "a", "seed": 1e30}"#, "seed", "64 bits"),
        (r#"{"prompt": "a", "logit_bias": {"the": 1}}"#, "logit_bias", "\"the\" is not the id"),
        (r#"{"prompt": "a", "logit_bias": {"1": 1, "01": 2}}"#, "logit_bias", "token 1"),
        (r#"{"prompt": "a", "logit_bias": {"1": "x"}}"#, "logit_bias.1", "a number"),
        (r#"{"prompt": "a", "logit_bias": [1]}"#, "logit_bias", "an object of token ids"),
        (r#"{"prompt": "a", "stop": 5}"#, "stop", "a text or a list of texts, not the number 5"),
        (r#"{"prompt": "a", "stop": ["x", ""]}"#, "stop", "stop[1] is empty"),
        (r#"{"prompt": "a", "stop": ["x", 5]}"#, "stop[1]", "a text, not the number 5"),
        (r#"{"prompt": "a", "stream": 1}"#, "stream", "true or false"),
        (
            r#"{"prompt": "a", "stream_options": {"include_usage": 1}}"#,
            "stream_options.include_usage",
            "true or false",
        ),
        (r#"{"prompt": "a", "model": 7}"#, "model", "a text, not the number 7"),
        (r#"{"prompt": 5}"#, "prompt", "a text, a list of texts"),
        (r#"{"prompt": []}"#, "prompt", "prompt is empty"),
        (r#"{"prompt": ""}"#, "prompt", "prompt is empty"),
        (r#"{"prompt": ["a", ""]}"#, "prompt[1]", "prompt[1] is empty"),
        (r#"{"prompt": ["a", 5]}"#, "prompt[1]", "a text, not the number 5"),
        (r#"{"prompt": [1, "a"]}"#, "prompt[1]", "a token id, not the text \"a\""),
        (r#"{"prompt": [1, -1]}"#, "prompt[1]", "a token id, not the number -1"),
        (r#"{"prompt": [[1], 2]}"#, "prompt[1]", "a list of token ids, not the number 2"),
        (r#"{"prompt": [[1], [2, null]]}"#, "prompt[1][1]", "a token id, not null"),
        (r#"{"prompt": [[1], []]}"#, "prompt[1]", "prompt[1] is empty"),
        (r#"{"prompt": [null]}"#, "prompt", "a text, a list of texts"),
        (r#"{"max_tokens": 5}"#, "prompt", "prompt is missing: it must be a text, a list"),
    ] {
        let error = completion(text).expect_err(text);
        assert!(error.message.contains(says), "{text}: {}", error.message);
        assert_eq!(error.body()["error"]["param"], param, "{text}");
    }
    let many = format!(r#"{{"prompt": {:?}}}"#, vec!["a"; MAX_PROMPTS + 1]);
    assert!(completion(&many).unwrap_err().message.contains("65 prompts"));
}

#[test]
fn errors_in_chat_messages_name_the_field() {
    for (messages, param, says) in [
        ("5", "messages", "a list of at least one message, not the number 5"),
        ("[]", "messages", "a list of at least one message"),
        ("null", "messages", "messages is missing"),
        ("[7]", "messages[0]", "an object with role and content"),
        (r#"[{"content": "x"}]"#, "messages[0].role", "messages[0].role is missing"),
        (
            r#"[{"role": "user", "content": 5}]"#,
            "messages[0].content",
            "a text or a list of parts, not the number 5",
        ),
        (
            r#"[{"role": "user", "content": ["x"]}]"#,
            "messages[0].content[0]",
            "an object with type and text",
        ),
        (
            r#"[{"role": "user", "content": [{"type": "text"}]}]"#,
            "messages[0].content[0].text",
            "is missing",
        ),
        (
            r#"[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]"#,
            "messages[0].content[0].type",
            "\"image_url\" is not supported",
        ),
        (
            r#"[{"role": "user"}, {"role": "assistant", "tool_calls": "x"}]"#,
            "messages[1].tool_calls",
            "a list of calls",
        ),
    ] {
        let body = format!(r#"{{"messages": {messages}}}"#);
        let error = ChatRequest::read(body.as_bytes()).expect_err(&body);
        assert!(error.message.contains(says), "{body}: {}", error.message);
        assert_eq!(error.body()["error"]["param"], param, "{body}");
    }
    let error = chat(r#", "chat_template_kwargs": [1]"#).unwrap_err();
    assert_eq!(error.param.as_deref(), Some("chat_template_kwargs"));
    let twice = chat(r#", "messages": [{"role": "user", "content": "b"}]"#).unwrap_err();
    assert!(twice.message.contains("once"), "{}", twice.message);
}

#[test]
fn embeddings_are_returned_as_numbers_or_base64() {
    let ask = |more: &str| {
        let body = format!(r#"{{"input": ["a", "b"]{more}}}"#);
        EmbeddingRequest::read(body.as_bytes())
    };
    let vectors = [vec![1.0, -0.1], vec![0.5, 2.0]];
    let request = ask("").unwrap();
    assert_eq!(request.input, EmbeddingInput::Texts(vec!["a".to_owned(), "b".to_owned()]));
    let answer = request.answer("m", &vectors, 7);
    let second = json!({ "object": "embedding", "index": 1, "embedding": [0.5, 2.0] });
    assert_eq!(answer["data"][1], second);
    assert_eq!(answer["usage"], json!({ "prompt_tokens": 7, "total_tokens": 7 }));
    // As `struct.pack("<2f", 1.0, -0.1)` has them.
    let answer = ask(r#", "encoding_format": "base64""#).unwrap().answer("m", &vectors, 7);
    assert_eq!(answer["data"][0]["embedding"], "AACAP83MzL0=");
    assert_eq!(ask(r#", "dimensions": 2"#).unwrap().dimensions, Some(2));
    for (more, param, says) in [
        (r#", "dimensions": 0"#, "dimensions", "at least 1"),
        (
            r#", "encoding_format": "int8""#,
            "encoding_format",
            "float or base64, not the text \"int8\"",
        ),
        (r#", "truncate": "yes""#, "truncate", "true or false"),
    ] {
        let error = ask(more).unwrap_err();
        assert!(error.message.contains(says), "{}", error.message);
        assert_eq!(error.param.as_deref(), Some(param));
    }
    for (input, want) in [("[1, 2]", vec![vec![1, 2]]), ("[[1], [2]]", vec![vec![1], vec![2]])] {
        let body = format!(r#"{{"input": {input}}}"#);
        let request = EmbeddingRequest::read(body.as_bytes()).unwrap();
        assert_eq!(request.input, EmbeddingInput::Ids(want));
    }
}
