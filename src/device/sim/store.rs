//! The contents of a simulated disk: runs of equal blocks, each stored once. Terabytes of repeated blocks cost next to
//! nothing, and two stores that differ little share what they have in common.

#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::sync::Arc;

pub(super) const BLOCK: usize = 4096;

pub(super) type Content = Arc<[u8; BLOCK]>;

#[derive(Clone)]
struct Run {
    /// Blocks.
    count: u64,
    content: Content,
}

/// Blocks by number; one that is not there is all zeroes.
#[derive(Clone, Default)]
pub(super) struct Store {
    runs: BTreeMap<u64, Run>,
}

impl Store {
    /// What is in a block; `None` = zeroes.
    pub fn get(&self, block: u64) -> Option<&Content> {
        let (first, run) = self.runs.range(..=block).next_back()?;
        (block - first < run.count).then_some(&run.content)
    }

    /// Sets one block.
    pub fn set(&mut self, block: u64, bytes: &[u8]) {
        if let Some((first, run)) = self.runs.range_mut(..=block).next_back() {
            let inside = block - first < run.count;
            if (inside || block - first == run.count) && run.content[..] == *bytes {
                if !inside {
                    let first = *first;
                    self.cut(block, block + 1);
                    if let Some(run) = self.runs.get_mut(&first) {
                        run.count += 1;
                    }
                }
                return;
            }
        }
        self.cut(block, block + 1);
        if bytes.iter().any(|byte| *byte != 0) {
            let mut content = [0; BLOCK];
            content.copy_from_slice(bytes);
            self.runs.insert(block, Run { count: 1, content: Arc::new(content) });
        }
    }

    /// Makes blocks `from..to` zeroes.
    pub fn cut(&mut self, from: u64, to: u64) {
        if let Some((first, run)) = self.runs.range_mut(..from).next_back() {
            let end = first + run.count;
            if end > from {
                run.count = from - first;
                if end > to {
                    let rest = Run { count: end - to, content: Arc::clone(&run.content) };
                    self.runs.insert(to, rest);
                }
            }
        }
        while let Some((first, run)) = self.runs.range(from..to).next() {
            let (first, end, content) = (*first, first + run.count, Arc::clone(&run.content));
            self.runs.remove(&first);
            if end > to {
                self.runs.insert(to, Run { count: end - to, content });
            }
        }
    }

    /// Numbers of the blocks that are not all zeroes.
    pub fn blocks(&self) -> impl Iterator<Item = u64> + '_ {
        self.runs.iter().flat_map(|(first, run)| *first..first + run.count)
    }

    /// Runs of equal blocks: what the store costs.
    #[cfg(test)]
    pub fn runs(&self) -> usize {
        self.runs.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agrees_with_a_plain_map() {
        let (mut store, mut plain) = (Store::default(), BTreeMap::new());
        let mut state = 7u64;
        let mut next = |below: u64| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) % below
        };
        for _ in 0..20_000 {
            let (at, len) = (next(60), next(20));
            if next(3) == 0 {
                store.cut(at, at + len);
                plain.retain(|block, _| !(at..at + len).contains(block));
            } else {
                let value = next(4) as u8;
                for block in at..at + len {
                    store.set(block, &[value; BLOCK]);
                    match value {
                        0 => plain.remove(&block),
                        value => plain.insert(block, value),
                    };
                }
            }
            for block in 0..80 {
                assert_eq!(store.get(block).map(|content| content[9]), plain.get(&block).copied());
            }
            assert!(store.blocks().eq(plain.keys().copied()));
        }
    }

    #[test]
    fn repeated_blocks_are_stored_once() {
        let mut store = Store::default();
        for block in 0..1 << 16 {
            store.set(block, &[5; BLOCK]);
        }
        assert_eq!(store.runs(), 1);
        store.set(99, &[6; BLOCK]);
        assert_eq!(store.runs(), 3);
    }
}
