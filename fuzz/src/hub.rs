//! What a Hub of models sends: lists of files, headers, addresses, and files that name others.

use super::{Input, good};
use galaxy_cli::hub::{
    address::Address,
    answer::{self, ContentRange, Digest, Listing},
};
use galaxy_model::files;
use std::{collections::BTreeSet, time::SystemTime};

/// One of the Hub's messages, behind a byte that says which.
pub(crate) fn hub(bytes: &[u8]) {
    let mut input = Input(bytes);
    match input.byte() % 5 {
        0 => {
            let Some(listing) = good(Listing::parse(input.0)) else { return };
            assert!(listing.commit.bytes().all(|byte| byte.is_ascii_hexdigit()));
            assert!(listing.files.iter().all(|name| files::is_plain(name)));
            let wanted = files::wanted(&listing.files, "");
            let others = files::other_weights(&listing.files, "");
            assert!(wanted.iter().all(|name| !others.contains(name)));
        }
        1 => redirect(input.0),
        2 => headers(input.0),
        3 => {
            let Some(directories) = good(files::modules(input.0)) else { return };
            for directory in directories {
                let config = files::inside(&directory, files::CONFIG);
                let all = BTreeSet::from([config.clone(), "config.json/../x".to_owned()]);
                assert!(config.len() > 160 || files::wanted(&all, &directory) == [config]);
            }
        }
        _ => {
            let Some(shards) = good(files::shards(input.0)) else { return };
            assert!(shards.iter().all(|name| files::is_plain(name) && !name.contains('/')));
        }
    }
}

/// Resolves the address that a redirect names: an address of HTTP that a redirect to it gives again.
fn redirect(location: &[u8]) {
    let from = Address::endpoint("https://hub.example:8443/prefix").expect("an address");
    let from = from.below("/org/name/resolve/main/config.json").expect("an address");
    let Some(to) = good(from.redirect(location)) else { return };
    let text = to.uri().to_string();
    assert!(text.starts_with("https://") || text.starts_with("http://"), "{text}");
    assert_eq!(from.redirect(text.as_bytes()), Ok(to.clone()));
    assert!(!to.origin().to_string().contains(['@', ' ', '\n']), "{}", to.origin());
}

/// Reads a header's value as each kind of header in turn.
fn headers(value: &[u8]) {
    if let Some(version) = answer::version(value) {
        assert!(!version.contains(['/', '\\', ' ', '"']));
        assert_eq!(answer::version(version.as_bytes()).as_ref(), Some(&version));
        let digits = version.bytes().all(|byte| byte.is_ascii_hexdigit());
        assert_eq!(Digest::of(&version).is_some(), digits && matches!(version.len(), 40 | 64));
    }
    assert!(answer::words(value).chars().all(|c| matches!(c, ' '..='~')));
    let Ok(text) = std::str::from_utf8(value) else { return };
    let _ = ContentRange::parse(text);
    let wait = answer::wait(Some(text), None, SystemTime::UNIX_EPOCH);
    assert_eq!(answer::wait(Some(text), Some("x"), SystemTime::UNIX_EPOCH), wait);
    let _ = answer::wait(None, Some(text), SystemTime::UNIX_EPOCH);
}
