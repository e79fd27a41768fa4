//! A Hub that means harm: nothing that it says becomes a path, or takes memory without bound.

use super::hub::{Hub, Reply, contents, is_whole, seen, small};
use std::{fs, path::Path};

/// A directory with a place for the model two levels down, so that what is written outside is seen.
fn place() -> (tempfile::TempDir, std::path::PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let to = dir.path().join("a/model");
    fs::create_dir_all(&to).unwrap();
    (dir, to)
}

/// All that is below a directory and not in the model's, dots included.
fn outside(dir: &Path, to: &Path) -> Vec<String> {
    let mut found = Vec::new();
    let mut folders = vec![dir.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
            let path = entry.path();
            match path.is_dir() {
                _ if path == to => {}
                true => folders.push(path),
                false => found.push(path.display().to_string()),
            }
        }
    }
    found
}

const TAGS: [&str; 6] = [
    "\"../../evil\"",
    "/tmp/evil",
    "\"..\"",
    "W/\"a/../../../evil\"",
    "\"a b\\..\\c\"",
    "\"%2e%2e%2fevil\"",
];

#[test]
fn a_hostile_etag_is_never_used_as_a_path() {
    for tag in TAGS {
        let (dir, to) = place();
        let hub = Hub::scripted(small(), move |request, files, _| {
            let head = format!("etag: {tag}\r\nx-linked-etag: {tag}\r\nx-repo-commit: {tag}\r\n");
            Some(contents(request, files.get(request.file()?)?, &head))
        });
        hub.pull(&to);
        is_whole(&to, &hub);
        assert_eq!(outside(dir.path(), &to), Vec::<String>::new(), "{tag}");
        // It stands for no version; that of the commit does.
        assert_eq!(hub.pull(&to), Vec::<String>::new());
    }
}

#[test]
fn file_names_outside_the_directory_are_never_pulled() {
    let (dir, to) = place();
    let hub = Hub::new(small());
    let names = [
        "../config.json",
        "../../evil.safetensors",
        "/etc/config.json",
        "1_Pooling/../../config.json",
        "..\\config.json",
        ".git/config.json",
        "additional_chat_templates/../../x.jinja",
        "C:config.json",
        "model-\u{202e}.safetensors",
    ];
    for name in names {
        hub.state().files.insert(name.to_owned(), b"evil".to_vec());
    }
    let mut came = hub.pull(&to);
    came.sort();
    assert_eq!(came, ["config.json", "model.safetensors"]);
    let mut found = seen(&to);
    found.sort();
    assert_eq!(found, ["config.json", "model.safetensors"]);
    assert_eq!(outside(dir.path(), &to), Vec::<String>::new());
}

#[test]
fn index_and_module_files_with_outside_paths_are_refused() {
    let modules = |path: &str| serde_json::json!([{ "path": path }]).to_string();
    let index = |shard: &str| serde_json::json!({ "weight_map": { "a": shard } }).to_string();
    let cases = [
        ("modules.json", modules("../..")),
        ("modules.json", modules("/etc")),
        ("modules.json", "<html>".to_owned()),
        ("model.safetensors.index.json", index("../evil.safetensors")),
        ("model.safetensors.index.json", index("/etc/evil.safetensors")),
        ("model.safetensors.index.json", "[]".to_owned()),
    ];
    for (name, text) in cases {
        let (dir, to) = place();
        let mut files = small();
        if name.ends_with("index.json") {
            files.remove("model.safetensors");
        }
        files.insert(name.to_owned(), text.into_bytes());
        files.insert("../evil.safetensors".to_owned(), Vec::new());
        let said = Hub::new(files).refusal(&to);
        assert!(said.contains(name), "{said}");
        assert!(seen(&to).is_empty());
        assert_eq!(outside(dir.path(), &to), Vec::<String>::new());
    }
}

#[test]
fn a_malformed_listing_is_refused() {
    let listing = |sha: &str| serde_json::json!({ "sha": sha, "siblings": [] }).to_string();
    let long = format!("{{\"sha\": \"{}\"", "a".repeat(17 << 20));
    for (text, want) in [
        (listing("../../x"), "names a commit that is none"),
        (listing("main"), "names a commit that is none"),
        ("<html>".to_owned(), "is not understood"),
        (format!("{}1{}", "[".repeat(100_000), "]".repeat(100_000)), "is not understood"),
        (long, "longer than 16777216 bytes"),
    ] {
        let (_dir, to) = place();
        let hub = Hub::scripted(small(), move |_, _, _| {
            Some(Reply::new(200, "").body(text.clone().into_bytes()))
        });
        let said = hub.refusal(&to);
        assert!(said.contains(want), "{said}");
    }
}

#[test]
fn a_listing_of_too_many_files_is_refused() {
    let names: Vec<_> =
        (0..100_001).map(|i| serde_json::json!({ "rfilename": i.to_string() })).collect();
    let text = serde_json::json!({ "sha": "c0ffee", "siblings": names }).to_string();
    let (_dir, to) = place();
    let hub =
        Hub::scripted(small(), move |_, _, _| Some(Reply::new(200, "").body(text.as_bytes())));
    let said = hub.refusal(&to);
    assert!(said.contains("at most 100000 files"), "{said}");
}

#[test]
fn file_lengths_that_overflow_do_not_crash_the_pull() {
    let (_dir, to) = place();
    let mut files = small();
    let index = serde_json::json!({ "weight_map": { "a": "a.safetensors", "b": "b.safetensors" } });
    files.remove("model.safetensors");
    files.insert("model.safetensors.index.json".to_owned(), index.to_string().into_bytes());
    for name in ["a.safetensors", "b.safetensors"] {
        files.insert(name.to_owned(), b"x".to_vec());
    }
    let hub = Hub::scripted(files, |request, _, _| {
        let name = request.file().filter(|name| name.ends_with(".safetensors"))?;
        let size = u64::MAX;
        // Gone when its contents are asked for.
        match request.is_for_all() {
            true => Some(Reply::new(404, "")),
            false => Some(Reply::new(200, format!("x-linked-size: {size}\r\n")).body(name)),
        }
    });
    let said = hub.refusal(&to);
    assert!(said.contains("lists a.safetensors of org/name, and does not"), "{said}");
}

#[test]
fn an_oversized_config_file_is_refused() {
    let (_dir, to) = place();
    let hub = Hub::scripted(small(), |request, files, _| {
        let head = "x-linked-size: 1000000000000000\r\n";
        let file = request.file().filter(|file| file.ends_with(".json"))?;
        Some(contents(request, &files[file], head))
    });
    let refused = hub.refusal(&to);
    assert!(refused.contains("config.json has 1000000000000000 bytes"), "{refused}");
}

#[test]
fn error_messages_of_the_hub_are_escaped_and_shortened() {
    let (_dir, to) = place();
    let hub = Hub::scripted(small(), |_, _, _| {
        let words = format!("x-error-message: no\u{1b}[2J {}\r\n", "a".repeat(5000));
        Some(Reply::new(403, words))
    });
    let said = hub.refusal(&to);
    assert!(!said.contains('\u{1b}') && said.len() < 500, "{said}");
}
