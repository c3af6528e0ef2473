//! The proof that what is there is what came.
//!
//! While a stream is received, its data is digested, and so are its ranges, put together where they touch. Afterwards
//! the daemon is asked how the volume differs from its base, these ranges are read back from the pool, and both digests
//! must be the same: exactly what came was written, at exactly its place, and can be read. It takes no memory, however
//! many ranges there are.
#![forbid(unsafe_code)]

use crate::cli::diff::Range;

/// Two digests: of ranges, and of their data in order.
pub struct Proof {
    ranges: blake3::Hasher,
    data: blake3::Hasher,
    /// A range that may go on.
    open: Option<Range>,
}

/// What a proof comes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Digest {
    ranges: blake3::Hash,
    data: blake3::Hash,
}

impl Proof {
    /// Of nothing.
    pub fn new() -> Proof {
        Proof { ranges: blake3::Hasher::new(), data: blake3::Hasher::new(), open: None }
    }

    /// A range; they come in ascending order.
    pub fn range(&mut self, range: Range) {
        match &mut self.open {
            Some(last) if last.offset + last.length == range.offset && last.is_data == range.is_data => {
                last.length += range.length;
            }
            open => {
                let ended = open.replace(range);
                self.add(ended);
            }
        }
    }

    /// The data of ranges, in order.
    pub fn data(&mut self, data: &[u8]) {
        self.data.update(data);
    }

    fn add(&mut self, range: Option<Range>) {
        if let Some(range) = range {
            self.ranges.update(&range.offset.to_le_bytes());
            self.ranges.update(&range.length.to_le_bytes());
            self.ranges.update(&[u8::from(range.is_data)]);
        }
    }

    /// What it comes to.
    pub fn digest(mut self) -> Digest {
        let last = self.open.take();
        self.add(last);
        Digest { ranges: self.ranges.finalize(), data: self.data.finalize() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest(ranges: &[(u64, u64, bool)], data: &[&[u8]]) -> Digest {
        let mut proof = Proof::new();
        ranges.iter().for_each(|&(offset, length, is_data)| proof.range(Range { offset, length, is_data }));
        data.iter().for_each(|data| proof.data(data));
        proof.digest()
    }

    #[test]
    fn only_how_it_is_cut_does_not_matter() {
        let whole = digest(&[(0, 8, true), (8, 8, false), (24, 4, true)], &[b"abcdefghijkl"]);
        let cut =
            digest(&[(0, 4, true), (4, 4, true), (8, 8, false), (24, 4, true)], &[b"abcd", b"efghijkl"]);
        assert_eq!(whole, cut);
        for other in [
            digest(&[(0, 8, true), (8, 8, false), (24, 4, true)], &[b"abcdefghijkL"]),
            digest(&[(0, 8, true), (8, 8, false), (28, 4, true)], &[b"abcdefghijkl"]),
            digest(&[(0, 8, true), (8, 8, true), (24, 4, true)], &[b"abcdefghijkl"]),
            digest(&[(0, 8, true), (8, 8, false)], &[b"abcdefghijkl"]),
            digest(&[(0, 8, true), (8, 4, false), (24, 4, true)], &[b"abcdefghijkl"]),
        ] {
            assert_ne!(whole, other);
        }
    }
}
