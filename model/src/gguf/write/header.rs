//! The bytes at the beginning of a GGUF file that is written: its metadata fields.

use super::super::MAGIC;

/// The value of a metadata field.
#[derive(Clone, PartialEq, Debug)]
pub(super) enum Field {
    Whole(u32),
    Float(f32),
    Flag(bool),
    Text(String),
    Wholes(Vec<i32>),
    Floats(Vec<f32>),
    Texts(Vec<String>),
    Flags(Vec<bool>),
}

/// Metadata fields by their names, in the order of the file.
pub(super) type Fields = Vec<(String, Field)>;

impl Field {
    fn kind(&self) -> u32 {
        match self {
            Self::Whole(_) => 4,
            Self::Float(_) => 6,
            Self::Flag(_) => 7,
            Self::Text(_) => 8,
            Self::Wholes(_) | Self::Floats(_) | Self::Texts(_) | Self::Flags(_) => 9,
        }
    }

    fn write(&self, out: &mut Vec<u8>) {
        let list = |kind: u32, count: usize, out: &mut Vec<u8>| {
            out.extend(kind.to_le_bytes());
            out.extend((count as u64).to_le_bytes());
        };
        match self {
            Self::Whole(number) => out.extend(number.to_le_bytes()),
            Self::Float(number) => out.extend(number.to_le_bytes()),
            Self::Flag(flag) => out.push(u8::from(*flag)),
            Self::Text(of) => text(of, out),
            Self::Wholes(all) => {
                list(5, all.len(), out);
                all.iter().for_each(|number| out.extend(number.to_le_bytes()));
            }
            Self::Floats(all) => {
                list(6, all.len(), out);
                all.iter().for_each(|number| out.extend(number.to_le_bytes()));
            }
            Self::Texts(all) => {
                list(8, all.len(), out);
                all.iter().for_each(|of| text(of, out));
            }
            Self::Flags(all) => {
                list(7, all.len(), out);
                out.extend(all.iter().map(|flag| u8::from(*flag)));
            }
        }
    }
}

/// Writes a text as files have it: its length and its bytes.
pub(super) fn text(of: &str, out: &mut Vec<u8>) {
    out.extend((of.len() as u64).to_le_bytes());
    out.extend(of.as_bytes());
}

/// Writes the beginning of a file, up to the list of its tensors.
pub(super) fn head(fields: &[(String, Field)], tensors: usize, out: &mut Vec<u8>) {
    out.extend(MAGIC);
    out.extend(3u32.to_le_bytes());
    out.extend((tensors as u64).to_le_bytes());
    out.extend((fields.len() as u64).to_le_bytes());
    for (name, field) in fields {
        text(name, out);
        out.extend(field.kind().to_le_bytes());
        field.write(out);
    }
}
