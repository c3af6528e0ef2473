//! The contents of a simulated disk: runs of equal blocks, each stored once. Terabytes of repeated blocks cost next to
//! nothing, and two stores that differ little share what they have in common, as do blocks that were written shortly one
//! after the other, such as the two copies of a page.

#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::sync::Arc;

pub(super) const BLOCK: usize = 4096;

pub(super) type Content = Arc<[u8; BLOCK]>;

static ZEROES: [u8; BLOCK] = [0; BLOCK];

/// Contents met lately, by a part of their checksum.
const RECENT: usize = 1024;

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

/// Finds one content for equal blocks.
pub(super) struct Contents {
    recent: Vec<Option<Content>>,
}

impl Default for Contents {
    fn default() -> Contents {
        Contents { recent: vec![None; RECENT] }
    }
}

impl Contents {
    /// The content for a block; `None` = zeroes.
    pub fn of(&mut self, bytes: &[u8]) -> Option<Content> {
        if *bytes == ZEROES {
            return None;
        }
        let place = &mut self.recent[crate::crc32c::crc32c(bytes) as usize % RECENT];
        match place {
            Some(content) if **content == *bytes => Some(Arc::clone(content)),
            _ => {
                let mut content = [0; BLOCK];
                content.copy_from_slice(bytes);
                Some(Arc::clone(place.insert(Arc::new(content))))
            }
        }
    }
}

impl Store {
    /// What is in a block; `None` = zeroes.
    pub fn get(&self, block: u64) -> Option<&Content> {
        let (first, run) = self.runs.range(..=block).next_back()?;
        (block - first < run.count).then_some(&run.content)
    }

    /// Sets adjacent blocks to what `bytes` holds.
    pub fn write(&mut self, block: u64, bytes: &[u8], contents: &mut Contents) {
        let mut rest = bytes;
        while !rest.is_empty() {
            let (first, others) = rest.split_at(BLOCK);
            let equal = others.chunks_exact(BLOCK).take_while(|other| *other == first).count();
            let at = block + ((bytes.len() - rest.len()) / BLOCK) as u64;
            self.set(at, 1 + equal as u64, contents.of(first));
            rest = &others[equal * BLOCK..];
        }
    }

    /// Sets `count` blocks from `from` on; `None` = zeroes.
    pub fn set(&mut self, from: u64, count: u64, content: Option<Content>) {
        let to = from + count;
        let Some(content) = content else {
            return self.cut(from, to);
        };
        if let Some((first, run)) = self.runs.range_mut(..=from).next_back() {
            let end = first + run.count;
            if end >= from && (Arc::ptr_eq(&run.content, &content) || run.content == content) {
                if end < to {
                    run.count = to - first;
                    self.remove(end, to);
                }
                return;
            }
        }
        self.cut(from, to);
        self.runs.insert(from, Run { count, content });
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
        self.remove(from, to);
    }

    /// Forgets what begins in `from..to`, up to `to`.
    fn remove(&mut self, from: u64, to: u64) {
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
        let (mut store, mut plain, mut contents) = (Store::default(), BTreeMap::new(), Contents::default());
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
                // Each block its own value, or a few in a row the same.
                let values: Vec<u8> = match next(2) {
                    0 => (0..len).map(|_| next(4) as u8).collect(),
                    _ => vec![next(4) as u8; len as usize],
                };
                let bytes: Vec<u8> = values.iter().flat_map(|value| [*value; BLOCK]).collect();
                store.write(at, &bytes, &mut contents);
                for (block, value) in (at..).zip(values) {
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
        let (mut store, mut contents) = (Store::default(), Contents::default());
        for block in 0..1 << 16 {
            store.write(block, &[5; BLOCK], &mut contents);
        }
        assert_eq!(store.runs(), 1);
        store.write(99, &[6; BLOCK], &mut contents);
        assert_eq!(store.runs(), 3);
        store.write(1 << 20, &[6; BLOCK], &mut contents);
        let [one, other] = [99, 1 << 20].map(|block| store.get(block).expect("it was written"));
        assert!(Arc::ptr_eq(one, other));
    }
}
