//! What programs ask of `galaxy serve`.

use super::{Input, good};
use galaxy_cli::openai::{
    chat::Template,
    error::ApiError,
    rerank::RerankRequest,
    wire::{ChatRequest, CompletionRequest, EmbeddingInput, EmbeddingRequest},
};
use galaxy_client::GenerateOptions;
use std::collections::BTreeMap;

/// What chat templates in the wild do with messages: compare roles, call methods of strings, refuse, and
/// depend on the other fields of a request. A model's template is code, which may take more memory than a
/// target has here (ADR 0027); so these are ours, and of any other text it is only checked whether it is a
/// template.
const TEMPLATES: [&str; 4] = [
    "{% for message in messages %}{{ message.role + ': ' + message.content | trim }}\n{% endfor %}",
    "{{ bos_token }}{% for m in messages %}{% if m['role'] not in ['user', 'assistant'] %}\
     {{ raise_exception('no role ' ~ m.role) }}{% endif %}{{ m.role.upper() }}{{ m.content.strip().split('x')[-1] }}\
     {% if m.tool_calls %}{% for call in m.tool_calls %}{{ call.function | tojson }}{% endfor %}{% endif %}\
     {{ eos_token if not loop.last }}{% endfor %}{% if enable_thinking is false %}none{% endif %}",
    "{% set ns = namespace(last=0) %}{% for m in messages[::-1] %}{% if m.content is string and \
     m.content.startswith('<') %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{{ ns.last }}\
     {% for m in messages %}{{ m | items | list | length }}{{ m.name | default('-') }}{% endfor %}\
     {% for tool in tools | default([]) %}{{ tool | tojson(indent=2) }}{% endfor %}",
    "{% for m in messages %}{{ strftime_now(m.content) }}{{ m.content.split(sep, n) }}{{ m.content.rsplit(sep, n) }}\
     {{ m.content.find(sep, i, n) }}{{ m.content.splitlines(true) }}{{ m.content.title() }}{{ m.content.center(n) }}\
     {{ m.content.partition(sep) }}{{ m | string }}{{ m | tojson(ensure_ascii=true, indent=n, sort_keys=true) }}\
     {{ m.values() | join(sep) }}{{ m.items }}{{ m.content[i:n] }}{% endfor %}",
];

/// The body of a request of each kind, or a chat template.
pub(crate) fn serve(bytes: &[u8]) {
    let mut input = Input(bytes);
    match input.byte() % 5 {
        0 => {
            if let Some(CompletionRequest { prompts, choice }) =
                taken(CompletionRequest::read(input.0))
            {
                assert!((1..=64).contains(&prompts.len()));
                sound(&choice.options);
            }
        }
        1 => {
            let template = input.pick(&TEMPLATES);
            let Some(asked) = taken(ChatRequest::read(input.0)) else { return };
            sound(&asked.choice.options);
            let tokens = [("bos_token", "<s>"), ("eos_token", "</s>")];
            let tokens = tokens.map(|(name, text)| (name.to_owned(), text.to_owned()));
            let template = Template::new(template.into(), tokens.into()).expect("it is one");
            taken(template.text(&asked.messages, &asked.chat_template_kwargs));
        }
        2 => {
            let Some(asked) = taken(EmbeddingRequest::read(input.0)) else { return };
            let count = match &asked.input {
                EmbeddingInput::Texts(texts) => texts.len(),
                EmbeddingInput::Ids(many) => many.len(),
            };
            let answer = asked.answer("m", &vec![vec![0.5; 2]; count], 7);
            assert_eq!(answer["data"].as_array().map(Vec::len), Some(count));
        }
        4 => {
            if let Some(asked) = taken(RerankRequest::read(input.0)) {
                assert!(!asked.documents.is_empty());
            }
        }
        _ => {
            let Ok(text) = std::str::from_utf8(input.0) else { return };
            good(Template::new(text.into(), BTreeMap::new()));
        }
    }
}

/// The decoded request; `None` if it was refused, with an error that says why.
fn taken<T>(outcome: Result<T, ApiError>) -> Option<T> {
    outcome
        .map_err(|error| {
            assert!(!error.message.is_empty() && error.status.is_client_error());
            assert_eq!(error.body()["error"]["code"], *error.code);
        })
        .ok()
}

/// Checks options: nothing is left for the coordinator to check but what depends on the vocabulary.
fn sound(options: &GenerateOptions) {
    assert!(options.sampling.clone().complete(1).checked(u32::MAX).is_ok());
    assert!(options.stop.iter().all(|stop| !stop.is_empty()));
    let ordered = options.sampling.bias.is_sorted_by_key(|(token, _)| *token);
    assert!(ordered, "biases are in order");
}
