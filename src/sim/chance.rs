//! Chance that can be had again.

#![forbid(unsafe_code)]

/// SplitMix64: small, fast, and every seed is a good one.
#[derive(Debug, Clone)]
pub(super) struct Chance(u64);

impl Chance {
    pub fn new(seed: u64) -> Chance {
        Chance(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix(self.0)
    }

    /// A number below `limit`, which is not 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    /// Whether something happens that happens `parts` times in `of`.
    pub fn happens(&mut self, parts: u64, of: u64) -> bool {
        self.below(of) < parts
    }

    /// One of several; `None` when there is none.
    pub fn pick<T>(&mut self, mut of: impl ExactSizeIterator<Item = T>) -> Option<T> {
        let count = of.len() as u64;
        (count > 0).then(|| self.below(count)).and_then(|at| of.nth(at as usize))
    }
}

pub(super) fn mix(word: u64) -> u64 {
    let mixed = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ (mixed >> 31)
}
