//! The wire format of protocol buffers, read field by field from a file: what is not asked for is passed over, so
//! that no file is read whole.

use crate::positioned::{At, Problem};
use std::{
    fs::File,
    io::{BufReader, Read},
    ops::Range,
};

/// The most bytes that a name or another text may have.
const MAX_TEXT: u64 = 1 << 12;

/// What a field of a message holds.
pub(super) enum Field {
    /// A whole number, a flag or an enumeration.
    Varint(u64),
    /// Four bytes: a float.
    Fixed32([u8; 4]),
    /// Eight bytes: a double.
    Fixed64([u8; 8]),
    /// A text, a message, or packed numbers: where they lie in the file.
    Bytes(Range<u64>),
}

impl Field {
    /// The whole number that the field should hold.
    pub(super) fn whole(&self) -> Result<i64, Problem> {
        match self {
            Self::Varint(number) => Ok(*number as i64),
            _ => Err("a field that should be a whole number is none".into()),
        }
    }

    /// Where the text or message lies that the field should hold.
    pub(super) fn place(&self) -> Result<Range<u64>, Problem> {
        match self {
            Self::Bytes(range) => Ok(range.clone()),
            _ => Err("a field that should be a text or a message is none".into()),
        }
    }
}

/// A file of one message.
pub(super) struct Wire<'a> {
    inner: BufReader<At<'a>>,
    at: u64,
}

impl<'a> Wire<'a> {
    pub(super) fn new(file: &'a File) -> Self {
        Self { inner: BufReader::with_capacity(1 << 14, At { file, at: 0 }), at: 0 }
    }

    /// Gives each field of the message in `range`, in the order of the file. Whatever is read of a field, the next
    /// one follows.
    pub(super) fn fields(
        &mut self,
        range: Range<u64>,
        mut each: impl FnMut(&mut Self, u64, Field) -> Result<(), Problem>,
    ) -> Result<(), Problem> {
        self.go(range.start)?;
        while self.at < range.end {
            let key = self.varint(range.end)?;
            let field = match key & 7 {
                0 => Field::Varint(self.varint(range.end)?),
                1 => Field::Fixed64(self.array(range.end)?),
                2 => {
                    let length = self.varint(range.end)?;
                    if length > range.end - self.at {
                        return Err(format!(
                            "a field of {length} bytes goes beyond its message at byte {}: the file was cut short, or is none",
                            self.at
                        )
                        .into());
                    }
                    Field::Bytes(self.at..self.at + length)
                }
                5 => Field::Fixed32(self.array(range.end)?),
                other => {
                    return Err(format!(
                        "byte {} begins a field of type {other}, which there is not",
                        self.at - 1
                    )
                    .into());
                }
            };
            let next = match &field {
                Field::Bytes(range) => range.end,
                _ => self.at,
            };
            each(self, key >> 3, field)?;
            self.go(next)?;
        }
        Ok(())
    }

    /// Gives each whole number that is packed in `range`.
    pub(super) fn varints(
        &mut self,
        range: Range<u64>,
        mut each: impl FnMut(u64),
    ) -> Result<(), Problem> {
        self.go(range.start)?;
        while self.at < range.end {
            each(self.varint(range.end)?);
        }
        Ok(())
    }

    /// The bytes in `range`, which are not more than there are in the file.
    pub(super) fn bytes(&mut self, range: Range<u64>) -> Result<Vec<u8>, Problem> {
        self.go(range.start)?;
        let mut bytes = vec![0; (range.end - range.start) as usize];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    /// The text that a field holds.
    pub(super) fn text(&mut self, field: &Field) -> Result<String, Problem> {
        let range = field.place()?;
        if range.end - range.start > MAX_TEXT {
            return Err(format!("a text has {} bytes", range.end - range.start).into());
        }
        String::from_utf8(self.bytes(range)?).map_err(|_| "a text is not UTF-8".into())
    }

    fn go(&mut self, to: u64) -> Result<(), Problem> {
        let by = to as i64 - self.at as i64;
        match u64::try_from(by) {
            Ok(0) => {}
            _ => self.inner.seek_relative(by)?,
        }
        self.at = to;
        Ok(())
    }

    fn varint(&mut self, end: u64) -> Result<u64, Problem> {
        let mut number = 0u64;
        for shift in (0..64).step_by(7) {
            let [byte] = self.array(end)?;
            number |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Ok(number);
            }
        }
        Err(format!("the number at byte {} is longer than any", self.at).into())
    }

    fn array<const N: usize>(&mut self, end: u64) -> Result<[u8; N], Problem> {
        if N as u64 > end - self.at {
            return Err(format!("a message ends within a field at byte {}", self.at).into());
        }
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), Problem> {
        self.inner.read_exact(bytes)?;
        self.at += bytes.len() as u64;
        Ok(())
    }
}
