//! A Hub that refuses, has much to do, or is not like others.

use super::hub::{Hub, Reply, Then, came, contents, files, is_whole, refused, seen, sha256, small};
use std::net::TcpListener;

/// A Hub that gives this answer to the first `times` requests.
fn at_first(mut times: u32, status: u16, head: &'static str) -> Hub {
    Hub::scripted(small(), move |_, _, _| {
        times = times.checked_sub(1)?;
        Some(Reply::new(status, head))
    })
}

#[test]
fn a_short_wait_requested_by_the_hub_is_obeyed() {
    for (status, head) in [
        (429, "retry-after: 0\r\n"),
        (503, "retry-after: Sun, 06 Nov 1994 08:49:37 GMT\r\n"),
        (429, "ratelimit: \"api\";r=0;t=0\r\n"),
    ] {
        let (dir, hub) = (tempfile::tempdir().unwrap(), at_first(3, status, head));
        let (_, said) = came(hub.command(dir.path()));
        assert!(said.contains("again in 0"), "{said}");
        is_whole(dir.path(), &hub);
    }
}

#[test]
fn too_long_or_too_many_waits_fail_with_the_requested_wait_time() {
    for (status, head, want) in [
        (429, "retry-after: 3600\r\n", "asks to wait 3600 s (429)"),
        (429, "ratelimit: \"api\";r=0;t=300\r\n", "asks to wait 300 s (429)"),
        (503, "retry-after: 7200\r\n", "asks to wait 7200 s (503)"),
        // As often as it may be asked again.
        (503, "retry-after: 0\r\n", "asks to wait 0 s (503)"),
    ] {
        let (dir, hub) = (tempfile::tempdir().unwrap(), at_first(100, status, head));
        let said = hub.refusal(dir.path());
        assert!(said.contains(want) && said.contains("pull again then"), "{said}");
        let asked = hub.state().asked.len();
        assert_eq!(asked, if head.contains(": 0") { 6 } else { 1 });
    }
}

#[test]
fn a_refusal_by_the_hub_is_shown_with_a_remedy() {
    for (status, head, want) in [
        (401, "x-error-code: GatedRepo\r\n", &["accept its terms", "HF_TOKEN"][..]),
        (403, "x-error-code: GatedRepo\r\nx-error-message: ask Ann\r\n", &["ask Ann", "terms"]),
        (401, "x-error-code: RepoNotFound\r\n", &["not there, or not for everybody", "HF_TOKEN"]),
        (403, "", &["not for everybody (403)", "HF_TOKEN"]),
        (404, "x-error-code: RepoNotFound\r\n", &["there is no org/name", "--revision"]),
        (404, "x-error-code: RevisionNotFound\r\n", &["no revision \"main\"", "--revision"]),
        (403, "x-error-code: DisabledRepo\r\n", &["is disabled there"]),
        (418, "", &["answers 418"]),
    ] {
        let (dir, hub) = (tempfile::tempdir().unwrap(), at_first(100, status, head));
        let said = hub.refusal(dir.path());
        for want in want.iter().chain([&hub.endpoint.as_str()]) {
            assert!(said.contains(want), "{said}\nlacks {want}");
        }
        assert_eq!(hub.state().asked.len(), 1, "it is not asked again");
        hub.refusal(&dir.path().join("model"));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "there is no trace of it");
    }
}

#[test]
fn an_unreachable_or_malformed_endpoint_is_named() {
    let (dir, hub) = (tempfile::tempdir().unwrap(), Hub::new(small()));
    let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mut command = hub.command(dir.path());
    command.env("HF_ENDPOINT", format!("http://user:secret@{nobody}"));
    let said = refused(command);
    assert!(said.contains("cannot be reached") && said.contains("copy the directory"), "{said}");
    assert!(said.contains(&nobody.to_string()) && !said.contains("secret"), "{said}");
    let mut command = hub.command(dir.path());
    let output = command.env("HF_ENDPOINT", "hf-mirror.com").output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("https://") && said.contains("HF_ENDPOINT"), "{said}");
}

#[test]
fn an_unreachable_proxy_is_named_and_no_proxy_bypasses_it() {
    let (dir, hub) = (tempfile::tempdir().unwrap(), Hub::new(small()));
    let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let with = |exception: &str| {
        let mut command = hub.command(dir.path());
        command.env("HTTP_PROXY", format!("http://{nobody}")).env("NO_PROXY", exception);
        command
    };
    let said = refused(with("elsewhere.example"));
    assert!(said.contains(&format!("by the proxy {nobody}")), "{said}");
    came(with("127.0.0.1"));
    is_whole(dir.path(), &hub);
}

#[test]
fn a_file_with_a_wrong_digest_is_downloaded_once_more() {
    for times in [1, 2] {
        let (dir, mut left) = (tempfile::tempdir().unwrap(), times);
        let hub = Hub::scripted(small(), move |request, files, _| {
            let name = request.path.strip_prefix("/cdn/").filter(|_| request.is_for_all())?;
            left = u32::checked_sub(left, 1)?;
            let mut bytes = files[name].clone();
            *bytes.last_mut()? ^= 1;
            Some(contents(request, &bytes, ""))
        });
        if times == 1 {
            hub.pull(dir.path());
            is_whole(dir.path(), &hub);
            continue;
        }
        let said = hub.refusal(dir.path());
        assert!(said.contains("model.safetensors came with another digest"), "{said}");
        assert!(seen(dir.path()).is_empty());
    }
}

#[test]
fn a_small_file_must_match_its_git_or_sha1_digest() {
    for (plain, right) in [(false, true), (true, true), (false, false)] {
        let dir = tempfile::tempdir().unwrap();
        let hub = Hub::scripted(small(), move |request, files, _| {
            let bytes = files.get(request.file()?).filter(|b| b.len() < 10_000)?;
            let mut digest = super::hub::git(bytes);
            if plain {
                let own = ring::digest::digest(&ring::digest::SHA1_FOR_LEGACY_USE_ONLY, bytes);
                digest = super::hub::hex(own.as_ref());
            }
            if !right {
                digest = sha256(bytes)[..40].to_owned();
            }
            Some(contents(request, bytes, &format!("etag: \"{digest}\"\r\n")))
        });
        match right {
            true => drop(hub.pull(dir.path())),
            false => {
                let said = hub.refusal(dir.path());
                assert!(said.contains("config.json came with another digest"), "{said}");
            }
        }
    }
}

#[test]
fn a_mirror_without_ranges_and_etags_works() {
    let (dir, mut left) = (tempfile::tempdir().unwrap(), 1);
    let to = dir.path().join("model");
    let hub = Hub::scripted(files(), move |request, files, _| {
        let bytes = files.get(request.file()?)?;
        let whole = Reply::new(200, "").body(bytes.clone());
        let large = request.is_for_all() && bytes.len() > 1000;
        if !large || u32::checked_sub(left, 1).inspect(|&now| left = now).is_none() {
            return Some(whole);
        }
        Some(whole.half(Then::HangsUp))
    });
    hub.pull(&to);
    is_whole(&to, &hub);
}

#[test]
fn an_empty_file_is_pulled() {
    let (dir, hub) = (tempfile::tempdir().unwrap(), Hub::new(small()));
    hub.state().files.insert("added_tokens.json".to_owned(), Vec::new());
    assert_eq!(hub.pull(dir.path()).len(), 3);
    is_whole(dir.path(), &hub);
}

#[test]
fn a_revision_is_escaped() {
    let dir = tempfile::tempdir().unwrap();
    let hub = Hub::scripted(small(), |request, files, _| {
        let revision = request.path.strip_prefix("/api/models/org/name/revision/")?;
        assert_eq!(revision, "refs%2Fpr%2F1%3Fx");
        let names = files.keys().map(|name| serde_json::json!({ "rfilename": name }));
        let body = serde_json::json!({ "sha": "c0ffee", "siblings": names.collect::<Vec<_>>() });
        Some(Reply::new(200, "").body(body.to_string()))
    });
    let mut command = hub.command(dir.path());
    command.args(["--revision", "refs/pr/1?x"]);
    came(command);
    is_whole(dir.path(), &hub);
}
