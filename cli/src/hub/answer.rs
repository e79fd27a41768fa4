//! Parses what a Hub answers: the files of a repository, and headers.

use galaxy_model::files::is_plain;
use serde::{
    Deserialize, Deserializer,
    de::{Error as _, SeqAccess, Visitor},
};
use std::{
    collections::BTreeSet,
    fmt,
    time::{Duration, SystemTime},
};

/// The most digits of a commit, which has 40 or 64.
const MAX_COMMIT: usize = 64;
/// The most characters of a version. Digests have up to 64 digits, and other names of versions are of that kind.
const MAX_VERSION: usize = 128;
/// The most files of a repository; models have some dozens.
const MAX_FILES: usize = 100_000;
/// The most characters that are shown of a Hub's message.
const MAX_WORDS: usize = 200;

/// A repository at one commit.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Listing {
    /// The commit, in hexadecimal digits.
    pub commit: String,
    /// Its files, but for those whose names are not plain.
    pub files: BTreeSet<String>,
}

#[derive(Deserialize)]
struct Info {
    sha: String,
    #[serde(deserialize_with = "plain_names")]
    siblings: BTreeSet<String>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
}

impl Listing {
    /// Parses what a Hub answers about a model.
    ///
    /// # Errors
    /// What is wrong with the answer, for people.
    pub fn parse(text: &[u8]) -> Result<Self, String> {
        let Info { sha, siblings } = serde_json::from_slice(text)
            .map_err(|error| format!("it says of the model what is not understood ({error})"))?;
        let digits = sha.bytes().all(|byte| byte.is_ascii_hexdigit());
        if sha.is_empty() || sha.len() > MAX_COMMIT || !digits {
            return Err("it names a commit that is none".to_owned());
        }
        Ok(Self { commit: sha, files: siblings })
    }
}

/// Reads the names of files and keeps those that are plain; too many are refused before they are kept.
fn plain_names<'de, D: Deserializer<'de>>(from: D) -> Result<BTreeSet<String>, D::Error> {
    struct Names;

    impl<'de> Visitor<'de> for Names {
        type Value = BTreeSet<String>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "a list of at most {MAX_FILES} files")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
            let (mut names, mut count) = (BTreeSet::new(), 0);
            while let Some(Sibling { rfilename }) = list.next_element()? {
                count += 1;
                if count > MAX_FILES {
                    return Err(A::Error::invalid_length(count, &self));
                }
                if is_plain(&rfilename) {
                    names.insert(rfilename);
                }
            }
            Ok(names)
        }
    }

    from.deserialize_seq(Names)
}

/// The version in an `ETag`, without quotes and weakness; none where it is not of letters, digits and
/// `-_.:+=`, as versions of the Hub are.
pub fn version(etag: &[u8]) -> Option<String> {
    let text = std::str::from_utf8(etag).ok()?.trim();
    let text = text.strip_prefix("W/").unwrap_or(text);
    let text = text.strip_prefix('"').and_then(|text| text.strip_suffix('"')).unwrap_or(text);
    let known = |c: char| c.is_ascii_alphanumeric() || "-_.:+=".contains(c);
    let good = !text.is_empty() && text.len() <= MAX_VERSION && text.chars().all(known);
    good.then(|| text.to_owned())
}

/// The version and the size of a file in a repository.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct About {
    /// The version, which may be a digest; of a closed alphabet, and nothing to make paths of.
    pub version: String,
    /// The size of the file, in bytes.
    pub size: u64,
}

/// The digest of a file, which its version may be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Digest {
    /// SHA-256 of the contents, of files in large file storage.
    Sha256([u8; 32]),
    /// SHA-1: of the contents as git stores them, or of the contents alone, as some mirrors name them.
    Sha1([u8; 20]),
}

impl Digest {
    /// The digest that `version` is; none if it has not the digits of one.
    pub fn of(version: &str) -> Option<Self> {
        match version.len() {
            64 => digits(version).map(Self::Sha256),
            40 => digits(version).map(Self::Sha1),
            _ => None,
        }
    }
}

fn digits<const N: usize>(text: &str) -> Option<[u8; N]> {
    let mut out = [0; N];
    for (byte, pair) in out.iter_mut().zip(text.as_bytes().as_chunks::<2>().0) {
        let digit = |c: u8| char::from(c).to_digit(16);
        *byte = u8::try_from(digit(pair[0])? << 4 | digit(pair[1])?).ok()?;
    }
    Some(out)
}

/// A parsed `Content-Range` header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ContentRange {
    /// The index of the first byte that comes; none where no bytes come.
    pub from: Option<u64>,
    /// The bytes of the whole file; none where the header does not say.
    pub total: Option<u64>,
}

impl ContentRange {
    /// Parses the value of the header; none if it is malformed.
    pub fn parse(text: &str) -> Option<Self> {
        let (range, total) = text.trim().strip_prefix("bytes")?.trim_start().split_once('/')?;
        let from = match range.trim() {
            "*" => None,
            range => {
                let (from, to) = range.split_once('-')?;
                let (from, to): (u64, u64) = (number(from)?, number(to)?);
                Some(from).filter(|&from| from <= to)?.into()
            }
        };
        let total = match total.trim() {
            "*" => None,
            total => Some(number(total)?),
        };
        Some(Self { from, total })
    }
}

/// Parses a number of digits alone.
pub fn number(text: &str) -> Option<u64> {
    let text = text.trim();
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?
}

/// How long a Hub asks to wait: seconds or a date in `Retry-After`, or the seconds until a limit is lifted
/// in `RateLimit`.
pub fn wait(retry: Option<&str>, limit: Option<&str>, now: SystemTime) -> Option<Duration> {
    let date = |text: &str| {
        let then = httpdate::parse_http_date(text.trim()).ok()?;
        Some(then.duration_since(now).unwrap_or_default())
    };
    let retry = retry.and_then(|text| number(text).map(Duration::from_secs).or_else(|| date(text)));
    let limit = || {
        let mut parts = limit?.split([';', ',']);
        parts.find_map(|part| number(part.trim().strip_prefix("t=")?)).map(Duration::from_secs)
    };
    retry.or_else(limit)
}

/// A Hub's message as it may be shown: one line of at most `MAX_WORDS` printable ASCII characters.
pub fn words(text: &[u8]) -> String {
    let shown = |&byte: &u8| if matches!(byte, 0x20..=0x7e) { char::from(byte) } else { '?' };
    text.trim_ascii().iter().take(MAX_WORDS).map(shown).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listing_needs_a_commit_and_drops_unsafe_file_names() {
        let text = br#"{"sha": "c0ffee", "extra": [1], "siblings": [{"rfilename": "config.json", "size": 3},
            {"rfilename": "../x"}, {"rfilename": "/etc/passwd"}, {"rfilename": ".git/config"}]}"#;
        let listing = Listing::parse(text).expect("a listing");
        assert_eq!(listing.commit, "c0ffee");
        assert_eq!(listing.files.into_iter().collect::<Vec<_>>(), ["config.json"]);
        for sha in ["", "main", "../../x", "c0ffee/..", &"a".repeat(65)] {
            let text = serde_json::json!({ "sha": sha, "siblings": [] }).to_string();
            assert!(Listing::parse(text.as_bytes()).is_err(), "{sha}");
        }
        assert!(Listing::parse(b"<html>").is_err());
    }

    #[test]
    fn only_etags_of_safe_characters_become_versions() {
        for (etag, want) in [
            (&b"\"abc-1\""[..], Some("abc-1")),
            (b"W/\"abc\"", Some("abc")),
            (b"abc", Some("abc")),
            (b"\"../../x\"", None),
            (b"\"a/b\"", None),
            (b"\"\"", None),
            (b"", None),
            (b"\"a\x00b\"", None),
            (b"\xff", None),
        ] {
            assert_eq!(version(etag).as_deref(), want);
        }
        assert_eq!(version(&[b'a'; 200]), None);
    }

    #[test]
    fn a_version_of_40_or_64_digits_is_a_digest() {
        assert_eq!(Digest::of(&"0a".repeat(20)), Some(Digest::Sha1([10; 20])));
        assert_eq!(Digest::of(&"FF".repeat(32)), Some(Digest::Sha256([255; 32])));
        assert_eq!(Digest::of(&"g".repeat(40)), None);
        assert_eq!(Digest::of("linked"), None);
    }

    #[test]
    fn content_range_headers_parse() {
        let range = |text| ContentRange::parse(text).map(|range| (range.from, range.total));
        assert_eq!(range("bytes 5-9/10"), Some((Some(5), Some(10))));
        assert_eq!(range("bytes 5-9/*"), Some((Some(5), None)));
        assert_eq!(range("bytes */10"), Some((None, Some(10))));
        for text in ["", "bytes", "bytes 9-5/10", "bytes -5-9/10", "5-9/10", "bytes +5-9/10"] {
            assert_eq!(range(text), None, "{text}");
        }
        assert_eq!(range("bytes 0-99999999999999999999/1"), None);
    }

    #[test]
    fn wait_times_are_read_from_retry_after_and_ratelimit_headers() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(784_111_777);
        let seconds = |retry, limit| wait(retry, limit, now).map(|wait| wait.as_secs());
        assert_eq!(seconds(Some("120"), None), Some(120));
        assert_eq!(seconds(Some("Sun, 06 Nov 1994 08:50:37 GMT"), None), Some(60));
        assert_eq!(seconds(Some("Sun, 06 Nov 1994 08:00:00 GMT"), None), Some(0));
        assert_eq!(seconds(None, Some("\"api\";r=0;t=55")), Some(55));
        assert_eq!(seconds(Some("soon"), Some("\"api\";r=0")), None);
        assert_eq!(seconds(Some("-5"), None), None);
        assert_eq!(seconds(None, None), None);
    }

    #[test]
    fn server_messages_become_one_bounded_line() {
        assert_eq!(words(b" Access is\x1b[31m restricted\r\n"), "Access is?[31m restricted");
        assert_eq!(words(&[b'a'; 1000]).len(), MAX_WORDS);
    }
}
