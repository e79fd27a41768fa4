//! Generation: the messages of requests and of their tokens, stop strings, and the files of model directories
//! that set defaults and chat templates.

use super::{Input, good, messages::messages, models::directory, said};
use galaxy_client::Generated;
use galaxy_common::{Fallback, GenerateOptions, Sampling, sampling::MOST_LOGPROBS};
use galaxy_model::{chat::ChatFiles, generation::Ending};
use galaxy_proto::{convert, v1};
use prost::Message;
use std::fs;

/// The size of the model's vocabulary.
const VOCABULARY: u32 = 97;

/// A request, a token of a device or of the coordinator, stop strings, or the files of a model.
pub(crate) fn text(bytes: &[u8]) {
    let mut input = Input(bytes);
    match input.byte() % 6 {
        0 => ask(input.0),
        1 => told(input.0),
        2 => {
            for event in messages::<v1::GenerateEvent>(&mut input) {
                good(galaxy_client::fuzz::generated(event.event));
            }
        }
        3 => ending(&mut input),
        4 => {
            let Some(generation) = good(galaxy_model::fuzz::generation(input.0)) else { return };
            let fallback = Some(Fallback { temperature: 1.0, max_tokens: 16 });
            let silent = GenerateOptions { fallback, ..GenerateOptions::default() };
            if let Some(settled) = good(generation.complete(silent, 7, VOCABULARY)) {
                let sampling = settled.sampling.complete(1).checked(VOCABULARY);
                good(sampling);
                assert!(settled.max_tokens > 0);
            }
        }
        _ => {
            let dir = directory();
            let files = ["tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"];
            for name in files {
                if input.flag() {
                    fs::write(dir.path().join(name), input.piece()).expect("a file");
                }
            }
            for template in
                good(ChatFiles::open(dir.path())).iter().flat_map(|f| f.templates.values())
            {
                assert!(template.path.is_file(), "a template of no file");
            }
        }
    }
}

/// Checks that what a client asks reaches a device as it is, and that our own client would encode the same.
fn ask(bytes: &[u8]) {
    let Some(request) = good(v1::GenerateRequest::decode(bytes)) else { return };
    let Some((prompt, options)) = good(convert::generate_options(request)) else { return };
    // A NaN is refused with the settings that it becomes part of, and does not equal itself.
    if options.fallback.is_some_and(|fallback| fallback.temperature.is_nan()) {
        return;
    }
    let whole = options.sampling.clone().complete(1);
    let Some(sampling) = good(whole.checked(VOCABULARY)) else { return };
    assert!(sampling.temperature.is_finite() && sampling.logprobs <= MOST_LOGPROBS);
    let bytes = postcard::to_stdvec(&sampling).expect("a sampling has a binary form");
    let again: Sampling = postcard::from_bytes(&bytes).expect("its own");
    assert_eq!(again.checked(VOCABULARY).as_ref(), Ok(&sampling));

    let again = convert::generate_request(prompt.clone(), options.clone());
    assert_eq!(convert::generate_options(again), Ok((prompt, options)));
}

/// Converts a token that a device reports, and checks what the client gets.
fn told(bytes: &[u8]) {
    let event = match galaxy_coord::fuzz::token_event(bytes, VOCABULARY) {
        Ok(event) => event,
        Err(status) => return said(&galaxy_proto::fault::from_status(&status)),
    };
    let written = event.encode_to_vec();
    let event = v1::GenerateEvent::decode(written.as_slice()).expect("its own");
    let Some(Generated::Token(token)) = good(galaxy_client::fuzz::generated(event.event)) else {
        panic!("a token is none for a client");
    };
    assert!(token.token < VOCABULARY && token.top.len() <= MOST_LOGPROBS as usize);
    // A message does not distinguish 0 from -0.
    let (have, want) = (token.logprob, convert::floats(bytes)[1]);
    assert!(have == want || have.is_nan() && want.is_nan(), "{have} instead of {want}");
}

/// Stop strings, and pieces of a text. The text that is passed on contains no stop string, and lacks nothing
/// else.
fn ending(input: &mut Input<'_>) {
    let stops: Vec<String> =
        (0..input.within(0, 4)).map(|_| String::from_utf8_lossy(input.piece()).into()).collect();
    let mut ending = Ending::new(stops.clone());
    let (mut all, mut told) = (String::new(), String::new());
    while !input.is_empty() && !ending.stopped() {
        // Short pieces, so that a stop string is spread over several.
        let length = 1 + usize::from(input.byte() % 8);
        let (piece, rest) = input.0.split_at(length.min(input.0.len()));
        input.0 = rest;
        let piece = String::from_utf8_lossy(piece);
        all.push_str(&piece);
        told.push_str(ending.add(&piece));
    }
    told.push_str(ending.rest());
    assert_eq!(told, ending.text());
    let behind = all.strip_prefix(&told).expect("what was told is the text");
    let mut stops = stops.iter().filter(|stop| !stop.is_empty());
    assert!(!stops.clone().any(|stop| told.contains(stop)), "an end was told");
    match ending.stopped() {
        true => assert!(stops.any(|stop| behind.starts_with(stop)), "no end stands there"),
        false => assert!(behind.is_empty(), "it was held back"),
    }
}
