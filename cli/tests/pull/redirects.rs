//! Where a Hub sends us, and who learns the token.

use super::hub::{Files, Hub, Reply, Request, came, contents, git, is_whole, refused, seen, small};
use std::fs;

const TOKEN: &str = "hf_secret";

/// A mirror that tells nothing of a file before it has redirected us to it, by an answer of this status whose
/// `Location` is `location` before the name of the file. `HERE` in it is the mirror's own address.
fn mirror(files: Files, status: u16, location: &'static str) -> Hub {
    Hub::scripted(files, move |request, files, endpoint| {
        if let Some(rest) = request.path.strip_prefix("/other/") {
            let name = rest.split('?').next().unwrap();
            // One that compresses on the way.
            let head = format!("etag: W/\"{}\"\r\n", git(&files[name]));
            return Some(contents(request, &files[name], &head));
        }
        if let Some(rest) = request.path.strip_prefix("/second/org/name/") {
            return Some(Reply::new(307, format!("location: ../../../other/{rest}\r\n")));
        }
        let name = request.file()?;
        let here = location.replace("HERE", endpoint);
        let here = here.replace("LOCALHOST", &endpoint.replace("127.0.0.1", "localhost"));
        Some(Reply::new(status, format!("location: {here}{name}\r\nx-other: 1\r\n")))
    })
}

#[test]
fn redirects_before_the_file_metadata_are_followed() {
    let ways = [
        (302, "/other/"),
        (307, "/second/org/name/"),
        (308, "HERE/other/"),
        (301, "LOCALHOST/other/"),
        (303, "../../../../other/"),
        (302, "/.././other/a/../"),
    ];
    for (status, location) in ways {
        let (dir, hub) = (tempfile::tempdir().unwrap(), mirror(small(), status, location));
        let to = dir.path().join("model");
        assert_eq!(hub.pull(&to).len(), 2, "{location}");
        is_whole(&to, &hub);
        assert_eq!(hub.pull(&to), Vec::<String>::new(), "{location}");
    }
}

#[test]
fn a_renamed_model_is_pulled() {
    let dir = tempfile::tempdir().unwrap();
    let hub = Hub::scripted(small(), |request, _, _| {
        let renamed = request.path.contains("/org/old/").then_some(&request.path)?;
        let location = renamed.replace("/org/old/", "/org/name/");
        Some(Reply::new(307, format!("location: {location}\r\n")))
    });
    came(hub.command_of("org/old", dir.path()));
    is_whole(dir.path(), &hub);
}

/// Whether each of the requests had the token.
fn told(asked: &[Request]) -> Vec<bool> {
    asked.iter().map(|asked| asked.authorization.as_deref() == Some("Bearer hf_secret")).collect()
}

#[test]
fn the_token_is_sent_only_to_the_endpoint() {
    let dir = tempfile::tempdir().unwrap();
    let store = Hub::new(small());
    let at = store.endpoint.clone();
    // Another port is another host; from there it goes back to the first.
    let hub = Hub::scripted(small(), move |request, files, _| {
        if let Some(name) = request.path.strip_prefix("/back/") {
            return Some(contents(request, &files[name], ""));
        }
        let name = request.file()?;
        Some(Reply::new(302, format!("location: {at}/cdn/{name}\r\n")))
    });
    let back = hub.endpoint.clone();
    store.script(move |request, _, _| {
        let name = request.path.strip_prefix("/cdn/").filter(|name| *name == "config.json")?;
        Some(Reply::new(302, format!("location: {back}/back/{name}\r\n")))
    });
    let mut command = hub.command(dir.path());
    command.env("HF_TOKEN", TOKEN);
    came(command);
    is_whole(dir.path(), &hub);
    let (back, asked): (Vec<_>, Vec<_>) =
        hub.state().asked.clone().into_iter().partition(|asked| asked.path.starts_with("/back/"));
    assert!(told(&asked).iter().all(|&told| told) && asked.len() == 5, "{asked:?}");
    let elsewhere: Vec<_> = store.state().asked.iter().chain(&back).cloned().collect();
    assert_eq!(elsewhere.len(), 6);
    for asked in elsewhere {
        assert_eq!(asked.authorization, None, "{}", asked.path);
    }
}

#[test]
fn the_stored_login_token_is_used() {
    let (dir, hub) = (tempfile::tempdir().unwrap(), Hub::new(small()));
    fs::write(dir.path().join("token"), "hf_secret\n").unwrap();
    let mut command = hub.command(&dir.path().join("model"));
    command.env("HF_HOME", dir.path());
    came(command);
    assert!(told(&hub.state().asked)[0]);
}

#[test]
fn a_token_with_a_line_break_in_it_is_refused_and_not_shown() {
    let (dir, hub) = (tempfile::tempdir().unwrap(), Hub::new(small()));
    let mut command = hub.command(dir.path());
    let output = command.env("HF_TOKEN", "hf_sec\nret").output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(said.contains("HF_TOKEN") && !said.contains("hf_sec"), "{said}");
    assert!(hub.state().asked.is_empty());
}

#[test]
fn too_many_or_unsafe_redirects_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let hub = Hub::scripted(small(), |request, _, _| {
        request.file()?;
        Some(Reply::new(302, format!("location: {}x\r\n", request.path)))
    });
    let said = hub.refusal(dir.path());
    assert!(said.contains("more than 10 redirects"), "{said}");
    assert_eq!(hub.state().asked.len(), 12);
    for location in ["ftp://127.0.0.1/x", "file:///etc/passwd", "http://", "http://u:p@127.0.0.1/"]
    {
        let hub = Hub::scripted(small(), move |request, _, _| {
            request.file()?;
            Some(Reply::new(302, format!("location: {location}\r\n")))
        });
        let said = hub.refusal(dir.path());
        assert!(said.contains("not followed"), "{said}");
    }
    assert!(seen(dir.path()).is_empty());
}

#[test]
fn a_custom_certificate_authority_is_trusted_when_named() {
    let (dir, (hub, certificate)) = (tempfile::tempdir().unwrap(), Hub::secure(small()));
    let to = dir.path().join("model");
    let (own, others) = (dir.path().join("own.pem"), dir.path().join("others.pem"));
    fs::write(&own, certificate).unwrap();
    fs::write(&others, Hub::secure(small()).1).unwrap();
    let with = |authorities: &std::path::Path| {
        let mut command = hub.command(&to);
        command.env("SSL_CERT_FILE", authorities);
        command
    };
    let said = refused(with(&others));
    for want in ["certificate of https://127.0.0.1", "SSL_CERT_FILE"] {
        assert!(said.contains(want), "{said}");
    }
    came(with(&own));
    is_whole(&to, &hub);
    let output = with(&to.join("config.json")).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("SSL_CERT_FILE names none"), "{said}");
}

#[test]
fn redirects_from_https_to_http_are_refused() {
    let (dir, (hub, certificate)) = (tempfile::tempdir().unwrap(), Hub::secure(small()));
    let own = dir.path().join("own.pem");
    fs::write(&own, certificate).unwrap();
    let plain = Hub::new(small());
    let at = plain.endpoint.clone();
    hub.script(move |request, _, _| {
        Some(Reply::new(302, format!("location: {at}/cdn/{}\r\n", request.file()?)))
    });
    let mut command = hub.command(&dir.path().join("model"));
    command.env("SSL_CERT_FILE", own);
    let said = refused(command);
    assert!(said.contains(&format!("from https to {}", plain.endpoint)), "{said}");
    assert!(plain.state().asked.is_empty());
}
