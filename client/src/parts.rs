//! Cuts what is too much for one call into parts.

use std::ops::Range;

/// More texts or sequences than this go in parts: it is what a coordinator takes at once.
pub const MAX_TEXTS_PER_PART: usize = 1024;
/// Bytes of text in a part, far below what a message may have.
const MAX_BYTES_PER_PART: usize = 8 << 20;
/// Cuts items of these sizes into runs that a coordinator takes at once. No items are one empty
/// run: what to say of nothing is the coordinator's to decide.
pub(crate) fn parts(sizes: impl Iterator<Item = usize>) -> Vec<Range<usize>> {
    let mut parts = Vec::new();
    let (mut start, mut end, mut bytes) = (0, 0, 0usize);
    for size in sizes {
        let full = end - start == MAX_TEXTS_PER_PART
            || (end > start && bytes.saturating_add(size) > MAX_BYTES_PER_PART);
        if full {
            parts.push(start..end);
            (start, bytes) = (end, 0);
        }
        end += 1;
        bytes = bytes.saturating_add(size);
    }
    parts.push(start..end);
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(sizes: &[usize]) -> Vec<(usize, usize)> {
        parts(sizes.iter().copied()).into_iter().map(|part| (part.start, part.end)).collect()
    }

    #[test]
    fn many_texts_are_split_into_parts() {
        assert_eq!(cut(&[3; 5]), [(0, 5)]);
        assert_eq!(cut(&[0; 1024]), [(0, 1024)]);
        let ten_thousand = cut(&[3; 10_000]);
        assert_eq!(ten_thousand.len(), 10);
        assert_eq!(ten_thousand[9], (9216, 10_000));
        assert_eq!(cut(&[]), [(0, 0)]);
    }

    #[test]
    fn large_texts_get_parts_of_their_own() {
        let large = MAX_BYTES_PER_PART;
        assert_eq!(cut(&[large, 1, large * 2, 1]), [(0, 1), (1, 2), (2, 3), (3, 4)]);
        assert_eq!(cut(&[large - 1, 1, 1]), [(0, 2), (2, 3)]);
    }
}
