//! Makes text from elsewhere safe to show.
//!
//! A device, a server or a model's file may send anything: codes that move the cursor, change the title of a
//! window or answer for the person before it, letters that turn the direction of a line, a line break that
//! begins a line of its own. Such characters are escaped, as `\u{1b}`. What is escaped stays as it is when it
//! is escaped again.

use std::borrow::Cow;

/// Whether a character does anything but show itself.
fn acts(letter: char) -> bool {
    letter.is_control()
        || matches!(letter,
            // Directions, joiners and what is invisible,
            '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}'
            // and tags, which say what no one sees.
            | '\u{e0000}'..='\u{e007f}')
}

/// A text on one line of at most so many characters; where more are left, a note says how many bytes.
pub fn line(text: &str, most: usize) -> String {
    let mut out = String::new();
    let mut letters = text.chars();
    for letter in letters.by_ref().take(most) {
        match acts(letter) {
            true => out.extend(escape(letter)),
            false => out.push(letter),
        }
    }
    let left = letters.as_str().len();
    if left > 0 {
        out += &format!(" (and {left} bytes more)");
    }
    out
}

/// A text of several lines, in which tabs stay.
pub fn lines(text: &str) -> Cow<'_, str> {
    let bad = |letter: char| acts(letter) && letter != '\n' && letter != '\t';
    if !text.contains(bad) {
        return text.into();
    }
    let mut out = String::with_capacity(text.len());
    for letter in text.chars() {
        match bad(letter) {
            true => out.extend(escape(letter)),
            false => out.push(letter),
        }
    }
    out.into()
}

fn escape(letter: char) -> impl Iterator<Item = char> {
    let short = match letter {
        '\n' => Some("\\n"),
        '\r' => Some("\\r"),
        '\t' => Some("\\t"),
        _ => None,
    };
    let long = short.is_none().then(|| letter.escape_unicode());
    short.into_iter().flat_map(str::chars).chain(long.into_iter().flatten())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_escaped_and_readable_text_is_unchanged() {
        for (text, want) in [
            ("pi-2 says: größer als 東京 🙂\\n", "pi-2 says: größer als 東京 🙂\\n"),
            ("\x1b[2J\x1b]0;title\x07", "\\u{1b}[2J\\u{1b}]0;title\\u{7}"),
            ("lost\r\nerror: all is well", "lost\\r\\nerror: all is well"),
            ("\u{9b}31m\x7f\0", "\\u{9b}31m\\u{7f}\\u{0}"),
            ("safe\u{202e}lasrever\u{2066}", "safe\\u{202e}lasrever\\u{2066}"),
            ("\u{e0041}\u{200b}\u{2028}", "\\u{e0041}\\u{200b}\\u{2028}"),
        ] {
            assert_eq!(line(text, 100), want);
            assert_eq!(line(want, 200), want, "once is enough");
        }
        assert_eq!(lines("a\tb\nc\x1b[m"), "a\tb\nc\\u{1b}[m");
        assert!(matches!(lines("a\tb\n"), Cow::Borrowed(_)));
    }

    #[test]
    fn a_long_line_is_cut_and_shows_how_much_is_missing() {
        assert_eq!(line("äbc", 3), "äbc");
        assert_eq!(line("äbcdé", 3), "äbc (and 3 bytes more)");
        let long = line(&"x".repeat(1 << 20), 4000);
        assert!(long.len() < 4100 && long.ends_with("x (and 1044576 bytes more)"), "{long}");
    }
}
