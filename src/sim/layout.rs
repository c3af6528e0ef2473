//! Which blocks a run uses, and what is written into them.
//!
//! Volumes are thin and may be huge, but only a few chunks of 1 MiB are ever written: some at the beginning, some side by
//! side far away, so that paths through the trees are long and the model stays small. *Spots* number their blocks.

#![forbid(unsafe_code)]

use super::chance::{Chance, mix};

pub(super) const BLOCK: usize = 4096;
pub(super) const CHUNK: u64 = 1 << 20;
pub(super) const SPOTS_PER_CHUNK: usize = 256;

/// The chunks of a run.
#[derive(Debug, Clone)]
pub(super) struct Layout {
    chunks: Vec<u64>,
}

impl Layout {
    pub fn choose(chance: &mut Chance) -> Layout {
        let near = 1 + chance.below(2);
        let middle = 10 + chance.below(300);
        let far = 1000 + chance.below(1 << 20);
        let mut chunks: Vec<u64> = (0..near).collect();
        chunks.push(middle);
        if chance.happens(1, 2) {
            chunks.push(middle + 1);
        }
        chunks.push(far);
        Layout { chunks }
    }

    /// Sizes worth having, in bytes: each ends behind one of the chunks.
    pub fn sizes(&self) -> impl ExactSizeIterator<Item = u64> + '_ {
        self.chunks.iter().map(|chunk| (chunk + 1) * CHUNK)
    }

    pub fn spots(&self) -> usize {
        self.chunks.len() * SPOTS_PER_CHUNK
    }

    /// Spots within a volume of `size` bytes.
    pub fn spots_within(&self, size: u64) -> usize {
        self.chunks.iter().filter(|chunk| **chunk * CHUNK < size).count() * SPOTS_PER_CHUNK
    }

    /// Byte offset of a spot.
    pub fn offset(&self, spot: usize) -> u64 {
        self.chunks[spot / SPOTS_PER_CHUNK] * CHUNK + (spot % SPOTS_PER_CHUNK * BLOCK) as u64
    }

    /// How many of `count` spots from `spot` on lie side by side.
    pub fn run(&self, spot: usize, count: usize) -> usize {
        let mut end = spot + 1;
        while end < spot + count
            && end < self.spots()
            && self.offset(end) == self.offset(end - 1) + BLOCK as u64
        {
            end += 1;
        }
        end - spot
    }
}

/// A number for each write of a run; 0 is what nobody wrote: zeroes.
pub(super) type Version = u64;

/// Fills a block as write `version` does at byte `offset` of its volume.
pub(super) fn fill(block: &mut [u8], version: Version, offset: u64) {
    if version == 0 {
        block.fill(0);
        return;
    }
    let key = mix(version ^ offset.rotate_left(32));
    for (i, word) in block.chunks_exact_mut(8).enumerate() {
        let value = match i {
            0 => version,
            1 => offset,
            _ => key.wrapping_mul(2 * i as u64 + 1),
        };
        word.copy_from_slice(&value.to_le_bytes());
    }
}

/// Which write a block holds, and where it belongs; `None` when no single write would leave it so.
pub(super) fn parse(block: &[u8]) -> Option<(Version, u64)> {
    let word = |at: usize| block[at..at + 8].try_into().ok().map(u64::from_le_bytes);
    let (version, offset) = (word(0)?, word(8)?);
    let mut expected = [0; BLOCK];
    fill(&mut expected, version, offset);
    (block == expected).then_some((version, offset))
}
