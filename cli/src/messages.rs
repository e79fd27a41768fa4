//! Options that messages name: each must be one of the command that shows the message.
#![allow(clippy::unwrap_used)]

use super::Cli;
use clap::{Command, CommandFactory};
use std::{
    fs,
    path::{Path, PathBuf},
};

/// Commands that show the messages of a source file, beside those that are named after it.
fn commands(file: &str) -> Vec<&'static str> {
    match file {
        // The ways in which a coordinator cannot be asked, or refuses.
        "failure" => {
            let all = "embed classify generate chat run status trace demo serve drain";
            all.split(' ').collect()
        }
        "texts" => ["embed", "classify"].into(),
        "in_process" => ["generate", "chat", "run"].into(),
        "choice" | "decoder" => ["generate", "chat"].into(),
        "ids" => ["generate", "run"].into(),
        "images" => ["classify", "run"].into(),
        "networks" => ["run"].into(),
        "trace" => ["trace"].into(),
        "bench" | "decode" => ["bench"].into(),
        _ => Vec::new(),
    }
}

/// String literals of a source file before its tests, comments left out.
fn literals(source: &str) -> Vec<String> {
    let code = source.split("mod tests {").next().unwrap_or_default();
    let lines = code.lines().filter(|line| !line.trim_start().starts_with("//"));
    let code = lines.collect::<Vec<_>>().join("\n");
    // Of "one" between "two" every other part is a literal; an escaped quote ends none.
    let code = code.replace("\\\"", "'").replace("'\"'", "");
    let literals = code.split('"').skip(1).step_by(2);
    // An option alone is an argument of another program.
    let message = |text: &&str| !text.starts_with("--") || text.contains(' ');
    literals.filter(message).map(str::to_owned).collect()
}

/// Options that a message names, without their dashes.
fn options(message: &str) -> Vec<String> {
    let named = |part: &str| -> String {
        part.chars().take_while(|c| c.is_ascii_lowercase() || *c == '-').collect()
    };
    message
        .split("--")
        .skip(1)
        .map(named)
        .filter(|name| !["", "help"].contains(&name.as_str()))
        .collect()
}

/// Whether a command, or one of those below it, has an option.
fn has(command: &Command, option: &str) -> bool {
    command.get_arguments().any(|argument| argument.get_long() == Some(option))
        || command.get_subcommands().any(|below| has(below, option))
}

fn sources(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let (directories, files): (Vec<_>, Vec<_>) = entries.partition(|path| path.is_dir());
    // What no command shows, and what any may show, of its own options.
    let others = ["main.rs", "lib.rs", "hub.rs", "openai.rs", "hub", "openai", "messages.rs"];
    let other = |path: &PathBuf| others.iter().any(|other| path.ends_with(other));
    let files = files.into_iter().filter(|path| !other(path));
    let directories: Vec<PathBuf> = directories.into_iter().filter(|path| !other(path)).collect();
    directories.iter().flat_map(|directory| sources(directory)).chain(files).collect()
}

#[test]
fn options_in_messages_exist_in_the_commands_that_show_them() {
    let all = Cli::command();
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut checked = 0;
    for path in sources(&directory) {
        let own = path.strip_prefix(&directory).unwrap().iter().next().unwrap();
        let own = own.to_str().unwrap().trim_end_matches(".rs");
        let mut shown_by = commands(own);
        shown_by.extend(all.get_subcommands().map(Command::get_name).filter(|name| *name == own));
        for message in literals(&fs::read_to_string(&path).unwrap()) {
            // A message may name another command, in full.
            let other =
                message.split("galaxy ").nth(1).and_then(|rest| rest.split([' ', '`']).next());
            let other = other.and_then(|name| all.find_subcommand(name)).map(Command::get_name);
            for option in options(&message) {
                let commands = other.map_or(shown_by.clone(), |other| vec![other]);
                let place = path.display();
                assert!(!commands.is_empty(), "{place}: who shows {message:?}?");
                for command in commands {
                    let found = all.find_subcommand(command).unwrap();
                    assert!(
                        has(found, &option),
                        "galaxy {command} has no --{option}: {place}: {message:?}"
                    );
                    checked += 1;
                }
            }
        }
    }
    assert!(checked > 30, "{checked} options were found: are messages elsewhere now?");
}
