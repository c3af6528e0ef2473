//! What every thread does, made from a seed: so that nothing but numbers has to outlive a power cut.
//!
//! A thread owns its blocks alone and does one operation after the other. Operation `n` of a thread in a run is always
//! the same one, and a block that was written says by which operation, so whoever reads it later can tell what it is
//! and whether it may still, or already, be there.
#![forbid(unsafe_code)]

/// Bytes of a block: what a write must be whole in.
pub const BLOCK: usize = 4096;
/// Blocks that one thread owns.
pub const BLOCKS: u64 = 1024;
/// Of which volume each thread owns a part. The first volume has a write cache, the second has none.
pub const THREADS: [usize; 6] = [0, 0, 0, 0, 1, 1];
/// The volumes' names.
pub const VOLUMES: [&str; 2] = ["cached", "through"];

const MAGIC: u64 = 0x5d1e_9c0a_74f3_b826;
/// Of a thread's blocks, some are written far more often than the others.
const HOT_BLOCKS: u64 = 64;

/// What an operation does to its blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Write,
    /// Durable once it has returned.
    WriteThrough,
    Zero,
}

/// One operation: `count` blocks from `first` on, counted within the thread's own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Operation {
    pub kind: Kind,
    pub first: u64,
    pub count: u64,
    /// A flush follows it.
    pub then_flush: bool,
}

/// Names one operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stamp {
    pub run: u32,
    pub thread: u32,
    pub number: u64,
}

/// What a block was found to hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content {
    Zeroes,
    Written(Stamp),
    /// Neither zeroes nor anything that was ever written to this block, whole.
    Wrong,
}

/// A number that looks random and depends on `value` alone.
pub fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// Whether a run is one with few flushes, so that much is in the disk's cache when the power goes: only threads of the
/// volume with a write cache work.
pub fn is_quiet(run: u32) -> bool {
    !run.is_multiple_of(3)
}

/// Operation `number` of a thread.
pub fn operation(seed: u64, stamp: Stamp) -> Operation {
    let mut state = mix(seed ^ key(stamp));
    let mut below = |limit: u64| {
        state = mix(state.wrapping_add(0x9e37_79b9_7f4a_7c15));
        state % limit
    };
    let quiet = is_quiet(stamp.run);
    let kind = match below(100) {
        0..6 => Kind::Zero,
        6..16 if !quiet => Kind::WriteThrough,
        _ => Kind::Write,
    };
    // Mostly small; now and then one that spans more than a megabyte, and so more than one shard.
    let count = match below(40) {
        0 => 200 + below(120),
        1..8 => 1 + below(32),
        _ => 1 + below(3),
    };
    let range = if below(2) == 0 { HOT_BLOCKS.max(count) } else { BLOCKS };
    Operation {
        kind,
        first: below(range - count + 1),
        count,
        then_flush: below(if quiet { 150 } else { 16 }) == 0,
    }
}

/// The content of a thread's block after the operation `stamp` wrote it.
pub fn fill(seed: u64, stamp: Stamp, block: u64, bytes: &mut [u8]) {
    let head = [MAGIC, u64::from(stamp.run) << 32 | u64::from(stamp.thread), stamp.number, block];
    let salt = mix(seed ^ key(stamp)) ^ block;
    for (at, word) in bytes.chunks_exact_mut(8).enumerate() {
        let value = head.get(at).copied().unwrap_or_else(|| (salt ^ at as u64).wrapping_mul(MAGIC | 1));
        word.copy_from_slice(&value.to_le_bytes());
    }
}

/// What a block holds, every byte looked at.
pub fn recognise(seed: u64, thread: u32, block: u64, bytes: &[u8]) -> Content {
    let word =
        |at: usize| bytes[at * 8..].first_chunk().map_or(0, |bytes: &[u8; 8]| u64::from_le_bytes(*bytes));
    if word(0) != MAGIC {
        return if bytes.iter().all(|byte| *byte == 0) { Content::Zeroes } else { Content::Wrong };
    }
    let stamp = Stamp { run: (word(1) >> 32) as u32, thread: word(1) as u32, number: word(2) };
    let mut expected = [0; BLOCK];
    fill(seed, stamp, block, &mut expected);
    match stamp.thread == thread && bytes == expected {
        true => Content::Written(stamp),
        false => Content::Wrong,
    }
}

fn key(stamp: Stamp) -> u64 {
    mix(u64::from(stamp.run) << 32 | u64::from(stamp.thread)).wrapping_add(stamp.number)
}
