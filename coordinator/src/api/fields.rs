//! Scans a request while it arrives, before it is decoded: how many fields it has, and what those
//! will take that are larger in memory than on the wire.

/// Bytes that one number of a list takes at most while the list grows in memory.
const NUMBER: u64 = 12;
/// Bytes that a text, a list or a message takes in memory beside its content.
const FIELD: u64 = 64;

/// The fields of a message that matter for its size in memory, by their numbers.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Shape {
    /// Fields that are messages; the fields of these are scanned, too.
    pub messages: &'static [u64],
    /// Fields of the message itself that are lists of numbers.
    pub numbers: &'static [u64],
    /// Fields of the messages inside that are lists of numbers.
    pub numbers_inside: &'static [u64],
}

/// The shape of the request that goes to `path`; empty for requests of which no part is larger in memory.
pub fn shape(path: &str) -> Shape {
    match path {
        "/galaxy.v1.Galaxy/Embed" => {
            Shape { messages: &[3], numbers_inside: &[1], ..Shape::default() }
        }
        "/galaxy.v1.Galaxy/Run" => {
            Shape { messages: &[1], numbers_inside: &[1], ..Shape::default() }
        }
        "/galaxy.v1.Galaxy/Generate" => {
            Shape { messages: &[4], numbers: &[2, 8], ..Shape::default() }
        }
        _ => Shape::default(),
    }
}

/// Scans a protobuf message in parts of any length.
#[derive(Debug)]
pub struct Fields {
    shape: Shape,
    state: FieldState,
    /// Bytes that are left of the message inside; none while no such message is being read.
    inside: Option<u64>,
    /// Texts, lists and messages so far.
    count: usize,
    /// Bytes in memory beyond those on the wire.
    extra: u64,
}

#[derive(Debug)]
enum FieldState {
    /// A number is being read; `what` says what it stands for.
    Number { value: u64, shift: u32, what: What },
    /// So many bytes are to be skipped.
    Skip(u64),
    /// What came is no message: whoever decodes it will say so.
    Lost,
}

#[derive(Clone, Copy, Debug)]
enum What {
    Tag,
    Value(u64),
    Length(u64),
}

const TAG: FieldState = FieldState::Number { value: 0, shift: 0, what: What::Tag };

impl Fields {
    /// A scan of a message of this shape, of which nothing was read yet.
    pub fn new(shape: Shape) -> Self {
        Self { shape, state: TAG, inside: None, count: 0, extra: 0 }
    }

    /// Texts, lists and messages so far.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Bytes that the fields so far will take in memory beyond those on the wire.
    pub fn extra(&self) -> u64 {
        self.extra
    }

    /// Scans the next part of the message.
    pub fn read(&mut self, mut bytes: &[u8]) {
        while let Some((first, rest)) = bytes.split_first() {
            let taken = match self.state {
                FieldState::Lost => return,
                FieldState::Skip(left) => {
                    let taken = left.min(bytes.len() as u64);
                    self.state = if taken == left { TAG } else { FieldState::Skip(left - taken) };
                    bytes = &bytes[taken as usize..];
                    taken
                }
                FieldState::Number { value, shift, what } => {
                    bytes = rest;
                    self.digit(*first, value, shift, what);
                    1
                }
            };
            self.went_on(taken);
        }
    }

    /// Whether a field of the message that is being read is a list of numbers.
    fn numbers(&self, field: u64) -> bool {
        let known = match self.inside {
            Some(_) => self.shape.numbers_inside,
            None => self.shape.numbers,
        };
        known.contains(&field)
    }

    fn digit(&mut self, byte: u8, value: u64, shift: u32, what: What) {
        let value = value | (u64::from(byte & 0x7f)).checked_shl(shift).unwrap_or(0);
        if byte & 0x80 != 0 {
            self.state = match shift {
                0..63 => FieldState::Number { value, shift: shift + 7, what },
                _ => FieldState::Lost,
            };
            return;
        }
        self.state = match what {
            What::Tag => self.tag(value >> 3, value & 7),
            What::Value(field) => {
                if self.numbers(field) {
                    self.extra += NUMBER;
                }
                TAG
            }
            What::Length(field) => self.length(field, value),
        };
    }

    fn tag(&self, field: u64, kind: u64) -> FieldState {
        match kind {
            0 => FieldState::Number { value: 0, shift: 0, what: What::Value(field) },
            1 => FieldState::Skip(8),
            2 => FieldState::Number { value: 0, shift: 0, what: What::Length(field) },
            5 => FieldState::Skip(4),
            _ => FieldState::Lost,
        }
    }

    fn length(&mut self, field: u64, length: u64) -> FieldState {
        self.count += 1;
        self.extra = self.extra.saturating_add(FIELD);
        if self.numbers(field) {
            self.extra = self.extra.saturating_add(length.saturating_mul(NUMBER));
        }
        if length == 0 {
            return TAG;
        }
        if self.inside.is_none() && self.shape.messages.contains(&field) {
            // The last byte of its length counts as read when this returns.
            self.inside = Some(length + 1);
            return TAG;
        }
        FieldState::Skip(length)
    }

    fn went_on(&mut self, bytes: u64) {
        if let Some(left) = self.inside {
            self.inside = left.checked_sub(bytes).filter(|left| *left > 0);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use galaxy_proto::v1;
    use proptest::prelude::*;
    use prost::Message;

    fn read(path: &str, bytes: &[u8], step: usize) -> (usize, u64) {
        let mut fields = Fields::new(shape(path));
        bytes.chunks(step.max(1)).for_each(|part| fields.read(part));
        (fields.count(), fields.extra())
    }

    #[test]
    fn fields_larger_in_memory_than_on_the_wire_are_counted() {
        // 16 MiB of empty lists took 606 MB.
        let empty = [0x1a, 0].repeat(100_000);
        assert_eq!(read("/galaxy.v1.Galaxy/Embed", &empty, 1000).0, 100_000);
        let ids = v1::RunRequest {
            sequences: vec![v1::Sequence { ids: vec![1; 1000], ..Default::default() }; 3],
            ..Default::default()
        };
        let (count, extra) = read("/galaxy.v1.Galaxy/Run", &ids.encode_to_vec(), 7);
        assert_eq!(count, 6);
        assert!((36_000..40_000).contains(&extra), "{extra}");
        let prompt = v1::GenerateRequest { ids: vec![300; 1000], ..Default::default() };
        let (_, extra) = read("/galaxy.v1.Galaxy/Generate", &prompt.encode_to_vec(), 1);
        assert!(extra >= 12_000, "{extra}");
        let behind = v1::GenerateRequest { generated: vec![300; 1000], ..Default::default() };
        let (_, extra) = read("/galaxy.v1.Galaxy/Generate", &behind.encode_to_vec(), 1);
        assert!(extra >= 12_000, "{extra}");
        // Numbers that do not stand together are as many.
        let apart = [0x10, 1].repeat(500);
        assert_eq!(read("/galaxy.v1.Galaxy/Generate", &apart, 3), (0, 6000));
    }

    #[test]
    fn a_text_adds_only_its_overhead_to_its_size_on_the_wire() {
        let texts = vec!["x".repeat(5000); 10];
        let request = v1::EmbedRequest { texts, ..Default::default() };
        assert_eq!(read("/galaxy.v1.Galaxy/Embed", &request.encode_to_vec(), 999), (10, 640));
    }

    proptest! {
        #[test]
        fn any_bytes_give_the_same_counts_in_any_chunks(
            bytes in proptest::collection::vec(any::<u8>(), 0..300),
            step in 1_usize..20,
        ) {
            for path in ["/galaxy.v1.Galaxy/Embed", "/galaxy.v1.Galaxy/Run", "/galaxy.v1.Galaxy/Generate"] {
                prop_assert_eq!(read(path, &bytes, step), read(path, &bytes, 300));
            }
        }

        #[test]
        fn the_field_count_of_an_embed_request_is_exact(
            ids in proptest::collection::vec(proptest::collection::vec(any::<u32>(), 1..9), 0..20),
            texts in proptest::collection::vec(".{0,20}", 0..20),
            step in 1_usize..20,
        ) {
            let ids: Vec<_> = ids.into_iter().map(|ids| v1::TokenIds { ids }).collect();
            let want = 2 * ids.len() + texts.len();
            let request = v1::EmbedRequest { texts, ids, ..Default::default() };
            let (count, _) = read("/galaxy.v1.Galaxy/Embed", &request.encode_to_vec(), step);
            prop_assert_eq!(count, want);
        }
    }
}
