//! Renders chats for `scripts/chat.py`: a line of standard input is `{"template", "tokens", "request"}`, and
//! one of standard output `{"text"}` or `{"refused"}`.

use galaxy_cli::openai::chat::{Message, Template, TemplateArguments};
use serde::Deserialize;
use serde_json::json;
use std::{
    collections::BTreeMap,
    io::{self, BufRead},
};

#[derive(Deserialize)]
struct Line {
    template: String,
    tokens: BTreeMap<String, String>,
    request: Request,
}

#[derive(Deserialize)]
struct Request {
    messages: Vec<Message>,
    #[serde(default)]
    chat_template_kwargs: TemplateArguments,
}

fn main() -> io::Result<()> {
    for line in io::stdin().lock().lines() {
        let answer = match render(&line?) {
            Ok(text) => json!({ "text": text }),
            Err(refusal) => json!({ "refused": refusal }),
        };
        println!("{answer}");
    }
    Ok(())
}

fn render(line: &str) -> Result<String, String> {
    let Line { template, tokens, request } =
        serde_json::from_str(line).map_err(|error| error.to_string())?;
    let template = Template::new(template, tokens).map_err(|error| error.to_string())?;
    template.text(&request.messages, &request.chat_template_kwargs).map_err(|error| error.message)
}
