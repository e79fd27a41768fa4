//! `galaxy chat` over real processes, and in one.
#![allow(clippy::unwrap_used)]

use galaxy_proto::identity::Role;
use galaxy_testbed::processes::{Setup, TestCluster, program, root};
use serde_json::Value;
use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

/// A chat template for a decoder whose tokens are bytes, so that the length of a chat in tokens is known.
const TEMPLATE: &str =
    "{% for message in messages %}{{ message.role[0] }}: {{ message.content }}\n{% endfor %}a: ";

/// A small decoder with the chat template.
fn decoder(directory: &Path) -> PathBuf {
    let to = directory.join("tiny-chat");
    fs::create_dir(&to).unwrap();
    for file in fs::read_dir(root().join("models/tiny-galaxy")).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), to.join(file.file_name())).unwrap();
    }
    fs::write(to.join("chat_template.jinja"), TEMPLATE).unwrap();
    to
}

/// Runs a chat in which these lines are typed.
fn say(mut command: Command, lines: &str) -> Output {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.env_remove("GALAXY_COORDINATOR").env_remove("GALAXY_IDENTITY");
    let mut chat = command.spawn().unwrap();
    chat.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
    chat.wait_with_output().unwrap()
}

fn chat(flags: &[&str]) -> Command {
    let mut command = Command::new(program("galaxy").unwrap());
    command.args(["chat", "--max-tokens", "12", "--temperature", "0"]).args(flags);
    command
}

fn of_cluster(cluster: &TestCluster, template: &Path, flags: &[&str]) -> Command {
    let mut command = chat(flags);
    command.args(["--coordinator", &cluster.address]).arg("--template").arg(template);
    command.arg("--identity").arg(cluster.keys.of("laptop", Role::Client).unwrap());
    command
}

fn here(model: &Path, flags: &[&str]) -> Command {
    let mut command = chat(flags);
    command.arg("--model").arg(model);
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// The objects that `--json` prints.
fn answers(output: &Output) -> Vec<Value> {
    assert!(output.status.success(), "{}", text(&output.stderr));
    text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn texts(answers: &[Value]) -> Vec<&str> {
    answers.iter().map(|answer| answer["text"].as_str().unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_chat_is_the_same_on_a_cluster_and_in_one_process() {
    let dir = tempfile::tempdir().unwrap();
    let model = decoder(dir.path());
    let cluster =
        TestCluster::start(Setup { kv_cache_tokens: Some(384), ..Setup::new(&model) }).unwrap();
    let lines = "Each device\n\nA plan says\n/clear\nEach device\n/exit\nnot said\n";
    let flags = ["--json", "--system", "be brief"];
    let on_cluster = answers(&say(of_cluster(&cluster, &model, &flags), lines));
    let one = answers(&say(here(&model, &flags), lines));
    assert_eq!(texts(&on_cluster), texts(&one));
    let three =
        answers(&say(here(&model, &["--json", "--system", "be brief", "--devices", "3"]), lines));
    assert_eq!(texts(&three), texts(&one));

    // The template's characters are bytes, and so are tokens.
    let first = "s: be brief\nu: Each device\na: ".len();
    let told = one[0]["text"].as_str().unwrap();
    let second = first + told.len() + "\nu: A plan says\na: ".len();
    let prompts: Vec<_> =
        one.iter().map(|answer| answer["prompt_tokens"].as_u64().unwrap() as usize).collect();
    assert_eq!(prompts, [first, second, first], "what was said is said again, until /clear");
    assert_eq!(one[2]["text"], one[0]["text"]);
    for (answer, context) in on_cluster.iter().map(|a| (a, 384)).chain(one.iter().map(|a| (a, 512)))
    {
        let number = |name: &str| answer[name].as_u64().unwrap();
        assert_eq!(number("context_tokens"), number("prompt_tokens") + number("tokens"));
        assert_eq!((number("tokens"), &answer["finish"]), (12, &Value::from("length")));
        assert_eq!(number("context"), context);
        assert!(answer["tokens_per_second"].as_f64().unwrap() > 0.0);
    }

    // Without --json the text alone is on stdout, and its costs are on stderr.
    let output = say(of_cluster(&cluster, &model, &["--system", "be brief"]), "Each device\n");
    assert_eq!(text(&output.stdout), format!("{told}\n"));
    let said = text(&output.stderr);
    let used = format!("{} of 384 tokens of the context", first + 12);
    assert!(said.contains("first token after") && said.contains(&used), "{said}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_chat_with_a_full_context_or_no_template_shows_the_reason() {
    let dir = tempfile::tempdir().unwrap();
    let model = decoder(dir.path());
    let long = "a".repeat(300);
    let cluster =
        TestCluster::start(Setup { kv_cache_tokens: Some(192), ..Setup::new(&model) }).unwrap();
    let on_cluster = say(of_cluster(&cluster, &model, &[]), &format!("hello\n{long}\nnot said\n"));
    let one = say(here(&model, &[]), &format!("hello\n{long}\n{long}\nnot said\n"));
    for (output, of, todo) in
        [(on_cluster, "of 192 tokens", "kv_cache_tokens"), (one, "of 512 tokens", "/clear")]
    {
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains("error: the context is full: the chat has "), "{said}");
        assert!(said.contains(of) && said.contains(todo), "{said}");
    }
    // An answer for which the context is too short is cut, and a message says so.
    let mut command = Command::new(program("galaxy").unwrap());
    command.args(["chat", "--max-tokens", "500", "--model"]).arg(&model);
    let output = say(command, &format!("{long}\n"));
    let said = text(&output.stderr);
    assert!(
        output.status.success() && said.contains("the answer is cut: the context is full"),
        "{said}"
    );

    let refused = |command: Command, says: &str| {
        let output = say(command, "hello\n");
        let said = text(&output.stderr);
        assert!(!output.status.success() && said.contains(says), "{said}");
    };
    refused(here(&root().join("models/tiny-galaxy"), &[]), "the model has no chat template");
    let mut nowhere = chat(&["--coordinator", &cluster.address]);
    nowhere.env("GALAXY_HOME", dir.path()).current_dir(dir.path());
    refused(nowhere, "with --template");
    let output = say(here(&model, &[]), "/help\n");
    assert!(text(&output.stderr).contains("/help is no command; there are /clear and /exit"));
}
