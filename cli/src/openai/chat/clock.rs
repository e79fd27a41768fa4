//! `strftime_now` of chat templates: the local time, written as Python's `strftime` writes it.

use time::{OffsetDateTime, Weekday};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
/// The widest field that a format may ask for.
const MAX_WIDTH: usize = 100;

/// The time of this machine's time zone, or UTC where that is not known.
pub(super) fn local() -> OffsetDateTime {
    OffsetDateTime::now_local().unwrap_or_else(|_| OffsetDateTime::now_utc())
}

/// A time as `format` says, in C's locale. What is no directive stays as it stands.
pub(super) fn strftime(format: &str, at: OffsetDateTime) -> String {
    let mut out = String::new();
    let mut rest = format;
    while let Some(start) = rest.find('%') {
        out.push_str(&rest[..start]);
        rest = &rest[start..];
        let (directive, length) = Directive::parse(rest);
        match directive.and_then(|directive| directive.write(at)) {
            Some(text) => out.push_str(&text),
            None => out.push_str(&rest[..length]),
        }
        rest = &rest[length..];
    }
    out + rest
}

/// One `%` and what follows: how a field is padded, and which field it is.
#[derive(Clone, Copy)]
struct Directive {
    /// The padding on the left: `None` for that of the field, `Some(None)` for no padding.
    pad: Option<Option<char>>,
    upper: bool,
    width: Option<usize>,
    field: char,
}

impl Directive {
    /// Reads the directive with which a text begins, and how many bytes it has.
    fn parse(text: &str) -> (Option<Self>, usize) {
        let mut directive = Self { pad: None, upper: false, width: None, field: '%' };
        for (index, letter) in text.char_indices().skip(1) {
            match letter {
                '-' if directive.width.is_none() => directive.pad = Some(None),
                '_' if directive.width.is_none() => directive.pad = Some(Some(' ')),
                '0' if directive.width.is_none() => directive.pad = Some(Some('0')),
                '^' if directive.width.is_none() => directive.upper = true,
                '0'..='9' => {
                    let digit = letter.to_digit(10).map_or(0, |digit| digit as usize);
                    let width = directive.width.unwrap_or(0).saturating_mul(10);
                    directive.width = Some(width.saturating_add(digit));
                }
                // Other forms of numbers and dates, which C's locale has not.
                'E' | 'O' => {}
                field => {
                    directive.field = field;
                    let fits = directive.width.is_none_or(|width| width <= MAX_WIDTH);
                    return (fits.then_some(directive), index + field.len_utf8());
                }
            }
        }
        (None, text.len())
    }

    /// The padded text of the field; none where there is no field of its name.
    fn write(self, at: OffsetDateTime) -> Option<String> {
        let (text, width, pad) = field(self.field, at)?;
        let width = self.width.unwrap_or(width);
        let text = if self.upper { text.to_uppercase() } else { text };
        let mut out = String::new();
        if let Some(pad) = self.pad.unwrap_or(Some(pad)) {
            out.extend(std::iter::repeat_n(pad, width.saturating_sub(text.chars().count())));
        }
        Some(out + &text)
    }
}

/// A field's text without padding, its width, and the padding.
fn field(name: char, at: OffsetDateTime) -> Option<(String, usize, char)> {
    let number = |value: i64, width| Some((value.to_string(), width, '0'));
    let spaced = |value: i64| Some((value.to_string(), 2, ' '));
    let text = |text: &str| Some((text.to_owned(), 0, ' '));
    let format = |format: &str| Some((strftime(format, at), 0, ' '));
    let month = MONTHS[usize::from(u8::from(at.month())) - 1];
    let day = day_name(at.weekday());
    let half = match at.hour() % 12 {
        0 => 12,
        hour => i64::from(hour),
    };
    let year = i64::from(at.year());
    let (iso_year, iso_week, _) = at.to_iso_week_date();
    match name {
        'Y' => number(year, 0),
        'C' => number(year.div_euclid(100), 2),
        'y' => number(year.rem_euclid(100), 2),
        'm' => number(u8::from(at.month()).into(), 2),
        'd' => number(at.day().into(), 2),
        'e' => spaced(at.day().into()),
        'H' => number(at.hour().into(), 2),
        'I' => number(half, 2),
        'k' => spaced(at.hour().into()),
        'l' => spaced(half),
        'M' => number(at.minute().into(), 2),
        'S' => number(at.second().into(), 2),
        'f' => number(at.microsecond().into(), 6),
        'j' => number(at.ordinal().into(), 3),
        'U' => number(at.sunday_based_week().into(), 2),
        'W' => number(at.monday_based_week().into(), 2),
        'V' => number(iso_week.into(), 2),
        'G' => number(iso_year.into(), 0),
        'g' => number(i64::from(iso_year).rem_euclid(100), 2),
        'u' => number(at.weekday().number_from_monday().into(), 1),
        'w' => number(at.weekday().number_days_from_sunday().into(), 1),
        's' => number(at.unix_timestamp(), 0),
        'a' => text(&day[..3]),
        'A' => text(day),
        'b' | 'h' => text(&month[..3]),
        'B' => text(month),
        'p' => text(if at.hour() < 12 { "AM" } else { "PM" }),
        'P' => text(if at.hour() < 12 { "am" } else { "pm" }),
        'c' => format("%a %b %e %H:%M:%S %Y"),
        'D' | 'x' => format("%m/%d/%y"),
        'F' => format("%Y-%m-%d"),
        'R' => format("%H:%M"),
        'T' | 'X' => format("%H:%M:%S"),
        'r' => format("%I:%M:%S %p"),
        // Python's `datetime.now()` knows of no time zone.
        'z' | 'Z' => text(""),
        'n' => text("\n"),
        't' => text("\t"),
        '%' => text("%"),
        _ => None,
    }
}

fn day_name(day: Weekday) -> &'static str {
    match day {
        Weekday::Monday => "Monday",
        Weekday::Tuesday => "Tuesday",
        Weekday::Wednesday => "Wednesday",
        Weekday::Thursday => "Thursday",
        Weekday::Friday => "Friday",
        Weekday::Saturday => "Saturday",
        Weekday::Sunday => "Sunday",
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use time::{Date, Month};

    fn at(year: i32, month: Month, day: u8, hour: u8) -> OffsetDateTime {
        let date = Date::from_calendar_date(year, month, day).unwrap();
        date.with_hms(hour, 5, 9).unwrap().assume_utc()
    }

    /// What Python's `datetime.strftime` says.
    #[test]
    fn formatted_times_match_python() {
        let format =
            "%I %p %P %U %W %V %G %g %j %e %k %l %C %y %u %w %-I %_m %05d %^B %10A|%010e|%E%|%Ey";
        for (time, want) in [
            (
                at(2024, Month::December, 30, 0),
                "12 AM am 52 53 01 2025 25 365 30  0 12 20 24 1 1 12 12 00030 DECEMBER     Monday|0000000030|%|24",
            ),
            (
                at(2021, Month::January, 1, 12),
                "12 PM pm 00 00 53 2020 20 001  1 12 12 20 21 5 5 12  1 00001 JANUARY     Friday|0000000001|%|21",
            ),
            (
                at(2023, Month::January, 1, 23),
                "11 PM pm 01 00 52 2022 22 001  1 23 11 20 23 7 0 11  1 00001 JANUARY     Sunday|0000000001|%|23",
            ),
        ] {
            assert_eq!(strftime(format, time), want);
        }
    }

    #[test]
    fn unknown_strftime_directives_stay_unchanged() {
        let time = at(2021, Month::January, 1, 12);
        for text in ["%", "100 %!", "%Q", "%-", "%999999999999999999999Y", "%é", "%\u{2028}x"] {
            assert_eq!(strftime(text, time), text);
        }
    }
}
