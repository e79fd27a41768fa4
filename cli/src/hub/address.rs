//! HTTP addresses: those that are asked for, and those that redirects lead to.

use std::fmt::{self, Write};
use ureq::http::{Uri, uri::Authority};

/// An absolute HTTP address with a host.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Address(Uri);

/// Why a text is no [`Address`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum AddressError {
    /// It cannot be parsed.
    #[error("it cannot be parsed")]
    Form,
    /// It is no HTTP address.
    #[error("it does not begin with https:// or http://")]
    Scheme,
    /// Its port is no number below 65536.
    #[error("its port is no number below 65536")]
    Port,
    /// It has a user in it, where that is not allowed.
    #[error("it has a user's name in it")]
    User,
}

impl Address {
    /// The address of an endpoint, which a person gave: it may have a user and a password.
    ///
    /// # Errors
    /// When the text is no such address.
    pub fn endpoint(text: &str) -> Result<Self, AddressError> {
        let uri: Uri = text.trim_end_matches('/').parse().map_err(|_| AddressError::Form)?;
        if uri.query().is_some() {
            return Err(AddressError::Form);
        }
        Self::checked(uri)
    }

    /// The address at `path` below this one; `path` begins with `/` and is escaped.
    ///
    /// # Errors
    /// When that is too long.
    pub fn below(&self, path: &str) -> Result<Self, AddressError> {
        let base = self.0.path().trim_end_matches('/');
        self.at(&format!("{base}{path}"))
    }

    /// Where a redirect from this address leads, by its `Location`: absolute or relative.
    ///
    /// # Errors
    /// When it leads to no address of HTTP.
    pub fn redirect(&self, location: &[u8]) -> Result<Self, AddressError> {
        let location = escaped(location);
        if location.is_empty() {
            return Err(AddressError::Form);
        }
        let absolute = match location.strip_prefix("//") {
            Some(_) => format!("{}:{location}", self.scheme()),
            None if has_scheme(&location) => location,
            None => return self.relative(&location),
        };
        let uri: Uri = absolute.parse().map_err(|_| AddressError::Form)?;
        if uri.authority().is_some_and(|authority| authority.as_str().contains('@')) {
            return Err(AddressError::User);
        }
        Self::checked(uri)
    }

    fn checked(uri: Uri) -> Result<Self, AddressError> {
        if !matches!(uri.scheme_str(), Some("http" | "https")) {
            return Err(AddressError::Scheme);
        }
        let (host, port) = split_port(uri.authority().ok_or(AddressError::Form)?);
        if host.is_empty() {
            return Err(AddressError::Form);
        }
        if port.strip_prefix(':').is_some_and(|port| port.parse::<u16>().is_err()) {
            return Err(AddressError::Port);
        }
        Ok(Self(uri))
    }

    fn relative(&self, location: &str) -> Result<Self, AddressError> {
        let (path, query) = match location.split_once('?') {
            Some((path, query)) => (path, format!("?{query}")),
            None => (location, String::new()),
        };
        let base = self.0.path();
        let path = match path {
            "" => base.to_owned(),
            _ if path.starts_with('/') => without_dots(path),
            _ => {
                let folder = base.rfind('/').map_or("/", |end| &base[..=end]);
                without_dots(&format!("{folder}{path}"))
            }
        };
        self.at(&format!("{path}{query}"))
    }

    /// The address of another path on the same host.
    fn at(&self, path: &str) -> Result<Self, AddressError> {
        let mut parts = self.0.clone().into_parts();
        parts.path_and_query = Some(path.parse().map_err(|_| AddressError::Form)?);
        Uri::from_parts(parts).map(Self).map_err(|_| AddressError::Form)
    }

    /// The URI that is asked for.
    pub fn uri(&self) -> &Uri {
        &self.0
    }

    /// Whether what is asked and answered is encrypted.
    pub fn is_secure(&self) -> bool {
        self.scheme() == "https"
    }

    /// Scheme, host and port, by which it is decided who gets a secret. Also for messages, since it has neither a
    /// password nor a signature in it.
    pub fn origin(&self) -> Origin {
        let (host, port) = self.0.authority().map_or(("", ""), split_port);
        let usual = if self.is_secure() { 443 } else { 80 };
        let port = port.strip_prefix(':').and_then(|port| port.parse().ok()).unwrap_or(usual);
        Origin { secure: self.is_secure(), host: host.to_ascii_lowercase(), port }
    }

    fn scheme(&self) -> &str {
        self.0.scheme_str().unwrap_or_default()
    }
}

/// Scheme, host and port of an address.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Origin {
    secure: bool,
    host: String,
    port: u16,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { secure, host, port } = self;
        match (secure, port) {
            (true, 443) => write!(f, "https://{host}"),
            (true, _) => write!(f, "https://{host}:{port}"),
            (false, 80) => write!(f, "http://{host}"),
            (false, _) => write!(f, "http://{host}:{port}"),
        }
    }
}

/// Escapes a text as one part of a path.
pub fn part(text: &str) -> String {
    let mut out = String::new();
    for byte in text.bytes() {
        match byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            true => out.push(byte.into()),
            false => escape(byte, &mut out),
        }
    }
    out
}

fn escape(byte: u8, out: &mut String) {
    // Writing to a string does not fail.
    let _ = write!(out, "%{byte:02X}");
}

/// The host of an authority, and its port with the colon, or nothing.
fn split_port(authority: &Authority) -> (&str, &str) {
    let text = authority.as_str();
    let text = text.rsplit_once('@').map_or(text, |(_, text)| text);
    let host = authority.host();
    (host, text.strip_prefix(host).unwrap_or_default())
}

/// A `Location` without its fragment, and with what may not stand in an address escaped.
fn escaped(location: &[u8]) -> String {
    let mut out = String::new();
    for &byte in location.trim_ascii().iter().take_while(|&&byte| byte != b'#') {
        match byte {
            b'"' | b'<' | b'>' | b'\\' | b'^' | b'`' | b'{' | b'|' | b'}' => escape(byte, &mut out),
            0x21..=0x7e => out.push(byte.into()),
            _ => escape(byte, &mut out),
        }
    }
    out
}

fn has_scheme(location: &str) -> bool {
    let end = location.find(|c: char| !c.is_ascii_alphanumeric() && !"+-.".contains(c));
    end.is_some_and(|end| end > 0 && location[end..].starts_with(':'))
}

/// A path that begins with `/`, without its parts `.` and `..`.
fn without_dots(path: &str) -> String {
    let mut parts: Vec<&str> = Vec::new();
    let all = path.split('/').skip(1);
    let ends_in_folder = matches!(path.rsplit('/').next(), Some("." | ".."));
    for part in all {
        match part {
            "." => {}
            ".." => drop(parts.pop()),
            _ => parts.push(part),
        }
    }
    let end = if ends_in_folder && !parts.is_empty() { "/" } else { "" };
    format!("/{}{end}", parts.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> Address {
        Address::endpoint(text).unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    #[test]
    fn redirects_resolve_absolute_and_relative_locations() {
        let from = address("http://hub:8080/prefix")
            .below("/org/name/resolve/main/config.json")
            .expect("an address");
        let cases = [
            ("https://cdn.example/a/b?x=1&y=%2F#part", "https://cdn.example/a/b?x=1&y=%2F"),
            ("HTTPS://CDN.example/a", "https://CDN.example/a"),
            ("//cdn.example/a", "http://cdn.example/a"),
            ("/api/x?y=1", "http://hub:8080/api/x?y=1"),
            ("other.json", "http://hub:8080/prefix/org/name/resolve/main/other.json"),
            ("../v2/x?../y", "http://hub:8080/prefix/org/name/resolve/v2/x?../y"),
            ("../../../../../../x", "http://hub:8080/x"),
            ("/a/./b/../c/..", "http://hub:8080/a/"),
            ("?x=1", "http://hub:8080/prefix/org/name/resolve/main/config.json?x=1"),
            ("/a b\u{e9}", "http://hub:8080/a%20b%C3%A9"),
            ("https://[::1]:9/x", "https://[::1]:9/x"),
        ];
        for (location, want) in cases {
            let found = from.redirect(location.as_bytes());
            assert_eq!(found.map(|a| a.uri().to_string()), Ok(want.to_owned()), "{location}");
        }
        for location in ["", "#x", "ftp://x/", "file:///etc/passwd", "http://", "https:", "x:y"] {
            assert!(from.redirect(location.as_bytes()).is_err(), "{location}");
        }
        let user = from.redirect(b"https://user:secret@cdn.example/");
        assert_eq!(user, Err(AddressError::User));
        assert_eq!(from.redirect(b"http://cdn:65536/"), Err(AddressError::Port));
    }

    #[test]
    fn an_origin_is_scheme_host_and_port() {
        let origin = |text| address(text).origin();
        assert_eq!(origin("https://Hub.example/a"), origin("https://hub.example:443/b"));
        assert_eq!(origin("https://user:secret@hub.example"), origin("https://hub.example"));
        assert_eq!(origin("https://user:secret@hub.example").to_string(), "https://hub.example");
        assert_eq!(origin("http://[::1]:80").to_string(), "http://[::1]");
        let others =
            ["http://hub.example", "https://hub.example:8443", "https://hub.example.evil.example"];
        for other in others {
            assert_ne!(origin(other), origin("https://hub.example"), "{other}");
        }
    }

    #[test]
    fn an_endpoint_must_be_an_http_address() {
        for text in ["", "hub", "hub:80", "ftp://hub", "https://", "http://hub:x", "http://a b"] {
            assert!(Address::endpoint(text).is_err(), "{text}");
        }
        let below = address("https://hub/hf/").below("/api").expect("an address");
        assert_eq!(below.uri().to_string(), "https://hub/hf/api");
    }

    #[test]
    fn a_part_of_a_path_is_escaped() {
        assert_eq!(part("refs/pr/1"), "refs%2Fpr%2F1");
        assert_eq!(part("v1.0-a_b~?#%"), "v1.0-a_b~%3F%23%25");
    }
}
