//! `galaxy pull` from a Hub that the test plays: the same answers, over HTTP on loopback.
#![allow(clippy::unwrap_used)]

mod broken;
mod busy;
mod hostile;
mod hub;
mod redirects;

use hub::{Files, Hub, LEFT, Reply, Then, files, is_whole, small};
use std::{fs, path::Path};

/// A Hub whose first answer with the weights is but a half.
fn halting(then: Then) -> Hub {
    let mut left = Some(then);
    Hub::scripted(files(), move |request, files, _| {
        let name = request.path.strip_prefix("/cdn/").filter(|_| request.is_for_all())?;
        let whole = Reply::new(200, "").body(files.get(name).filter(|b| b.len() > 1000)?.clone());
        Some(whole.half(left.take()?))
    })
}

#[test]
fn a_complete_model_is_pulled_and_a_broken_download_resumes() {
    let (dir, hub) = (tempfile::tempdir().unwrap(), halting(Then::HangsUp));
    let to = dir.path().join("model");
    let all = hub.state().files.len() - LEFT.len();
    assert_eq!(hub.pull(&to).len(), all);
    is_whole(&to, &hub);
    let half = hub.state().files["model.safetensors"].len() / 2;
    let name = || "model.safetensors".to_owned();
    let dense = ("2_Dense/model.safetensors".to_owned(), 0);
    assert_eq!(hub.weights_asked(), [dense, (name(), 0), (name(), half)]);
}

#[test]
fn only_changed_files_are_pulled_again_and_own_files_are_kept() {
    let (dir, hub) = (tempfile::tempdir().unwrap(), Hub::new(files()));
    let to = dir.path().join("model");
    // Somebody has a file of their own.
    fs::create_dir_all(&to).unwrap();
    fs::write(to.join("tokenizer_config.json"), "mine").unwrap();
    let came = hub.pull(&to);
    assert!(!came.contains(&"tokenizer_config.json".to_owned()), "{came:?}");
    assert_eq!(hub.pull(&to), Vec::<String>::new());
    {
        let mut state = hub.state();
        state.commit = "decade".to_owned();
        state.files.insert("tokenizer.json".to_owned(), b"another".to_vec());
        state.files.remove("chat_template.jinja");
    }
    assert_eq!(hub.pull(&to), ["tokenizer.json"]);
    assert_eq!(fs::read(to.join("tokenizer_config.json")).unwrap(), b"mine");
    hub.state().files.insert("tokenizer_config.json".to_owned(), b"mine".to_vec());
    is_whole(&to, &hub);
}

/// Kills a pull when a part of the weights has come.
fn killed(hub: &Hub, to: &Path) {
    let mut pulling = hub.start(to);
    let part = || {
        let found = fs::read_dir(to.join(".pull")).ok()?.filter_map(Result::ok);
        let mut parts = found.filter(|entry| {
            let name = entry.file_name().into_string().unwrap();
            name.starts_with("model.safetensors ") && name.ends_with(".part")
        });
        parts.find_map(|entry| entry.metadata().ok().map(|part| part.len()).filter(|&n| n > 0))
    };
    while part().is_none() {
        let ended = pulling.try_wait().unwrap();
        assert!(ended.is_none(), "it does not come to its weights: {ended:?}");
        std::thread::yield_now();
    }
    pulling.kill().unwrap();
    pulling.wait().unwrap();
}

#[test]
fn a_killed_pull_resumes() {
    let (dir, hub) = (tempfile::tempdir().unwrap(), halting(Then::Stalls));
    let to = dir.path().join("model");
    killed(&hub, &to);
    assert!(hub::seen(&to).is_empty(), "what is not whole is not seen");
    hub.pull(&to);
    is_whole(&to, &hub);
    let asked: Vec<_> = hub.weights_asked();
    let asked: Vec<_> = asked.iter().filter(|(name, _)| name == "model.safetensors").collect();
    assert!(asked.len() == 2 && asked[1].1 > 0, "{asked:?}");
}

#[test]
fn a_partial_file_of_another_version_is_not_resumed() {
    let (dir, hub) = (tempfile::tempdir().unwrap(), halting(Then::Stalls));
    let to = dir.path().join("model");
    killed(&hub, &to);
    hub.state().files.get_mut("model.safetensors").unwrap().reverse();
    hub.pull(&to);
    is_whole(&to, &hub);
}

#[test]
fn a_damaged_partial_file_is_downloaded_again() {
    let (dir, hub) = (tempfile::tempdir().unwrap(), halting(Then::Stalls));
    let to = dir.path().join("model");
    killed(&hub, &to);
    for entry in fs::read_dir(to.join(".pull")).unwrap().map(Result::unwrap) {
        if entry.path().extension().is_some_and(|end| end == "part") {
            let zeros = vec![0; entry.metadata().unwrap().len() as usize];
            fs::write(entry.path(), zeros).unwrap();
        }
    }
    hub.pull(&to);
    is_whole(&to, &hub);
    let asked = hub.weights_asked();
    assert_eq!(asked.last(), Some(&("model.safetensors".to_owned(), 0)), "{asked:?}");
}

#[test]
fn only_weight_files_of_the_index_are_pulled() {
    let dir = tempfile::tempdir().unwrap();
    let index = serde_json::json!({ "weight_map": { "a": "model-1.safetensors" } }).to_string();
    let mut files = small();
    files.remove("model.safetensors");
    files.insert("model.safetensors.index.json".to_owned(), index.into_bytes());
    files.insert("model-1.safetensors".to_owned(), b"one".to_vec());
    let hub = Hub::new(files.clone());
    hub.state().files.insert("model-2.safetensors".to_owned(), b"two".to_vec());
    let mut came = hub.pull(dir.path());
    came.sort();
    assert_eq!(came, files.into_keys().collect::<Vec<_>>());
    hub.state().files.remove("model-1.safetensors");
    let said = hub.refusal(dir.path());
    assert!(said.contains("no model-1.safetensors, which model.safetensors.index.json"), "{said}");
}

#[test]
fn a_model_of_the_old_module_layout_is_pulled_completely() {
    let dir = tempfile::tempdir().unwrap();
    let mut files = Files::new();
    for (name, bytes) in small() {
        files.insert(format!("0_Transformer/{name}"), bytes);
    }
    files.insert("1_Pooling/config.json".to_owned(), b"{}".to_vec());
    let modules = br#"[{"path": "0_Transformer"}, {"path": "1_Pooling"}]"#;
    files.insert("modules.json".to_owned(), modules.to_vec());
    let hub = Hub::new(files);
    assert_eq!(hub.pull(dir.path()).len(), 4);
    is_whole(dir.path(), &hub);
}

#[test]
fn repositories_without_a_supported_model_are_refused_with_a_reason() {
    let named = |names: &[&str]| {
        let files = names.iter().map(|name| ((*name).to_owned(), b"{}".to_vec()));
        Hub::new(files.collect())
    };
    for (names, want) in [
        (&[][..], "org/name has no config.json"),
        (&["config.json"], "org/name has no config.json with model.safetensors"),
        (&["config.json", "x-Q4.gguf"], "GGUF files, which are not pulled: x-Q4.gguf"),
        (&["config.json", "pytorch_model.bin"], "not read: pytorch_model.bin"),
        (&["adapter_config.json", "adapter_model.safetensors"], "is an adapter"),
        (&["config.json", "model.safetensors", "2_Dense/config.json"], ""),
    ] {
        let (dir, hub) = (tempfile::tempdir().unwrap(), named(names));
        if want.is_empty() {
            hub.pull(dir.path());
            continue;
        }
        let said = hub.refusal(dir.path());
        assert!(said.contains(want) && said.contains(&hub.endpoint), "{said}");
        assert!(hub::seen(dir.path()).is_empty());
    }
}

#[test]
fn a_module_whose_weights_are_of_another_format_is_refused() {
    let (dir, hub) = (tempfile::tempdir().unwrap(), Hub::new(files()));
    hub.state().files.remove("2_Dense/model.safetensors");
    let said = hub.refusal(dir.path());
    assert!(said.contains("no 2_Dense/model.safetensors"), "{said}");
    assert!(said.contains("2_Dense/pytorch_model.bin"), "{said}");
}

#[test]
fn a_model_without_a_tokenizer_is_pulled_with_a_note() {
    let (dir, hub) = (tempfile::tempdir().unwrap(), Hub::new(files()));
    hub.state().files.remove("tokenizer.json");
    let (pulled, _) = hub::came(hub.command(dir.path()));
    assert!(pulled["notes"].to_string().contains("no tokenizer.json"), "{pulled}");
    assert!(dir.path().join("vocab.txt").is_file());
}
