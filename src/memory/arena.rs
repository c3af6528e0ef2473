//! Where buffers come from: blocks of a power of two, 4 KiB to 2 MiB, cut from 2 MiB chunks.
//!
//! ```text
//! thread's own free list, per class ──refill, half a list──► central: chunks with free blocks, per class
//!            ▲     │                ◄──spill, half a list──           │ all blocks of a chunk are free
//!       drop │     ▼ allocate                                         ▼
//!           buffers in use                                  empty chunks, for any class
//! ```
//!
//! A thread's list takes and gives without synchronisation; the central lock is taken once per half list. A
//! buffer that is dropped on another thread goes to that thread's list. A larger buffer gets a mapping of
//! its own.
//!
//! Every block has a header beside its chunk, one for each 4 KiB of the chunk, made with it: allocation in
//! steady state calls neither malloc nor the system. The budget counts what is mapped, used or not.

use std::cell::RefCell;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicUsize, Ordering, fence};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::BUFFER_ALIGN;
use super::mapping::{HUGE_PAGE, Mapping};

/// How much memory buffers may take.
#[derive(Debug, Clone)]
pub struct ArenaConfig {
    /// Bytes that [`super::DmaBuf::try_uninit`] keeps within. Default 512 MiB.
    pub budget: usize,
    /// Threads that use buffers all the time; they share what may lie in their lists. Default 2.
    pub threads: usize,
    /// Take explicit huge pages (MAP_HUGETLB) where the system has free ones. Default false.
    pub hugetlb: bool,
}

impl Default for ArenaConfig {
    fn default() -> ArenaConfig {
        ArenaConfig { budget: DEFAULT_BUDGET, threads: 2, hugetlb: false }
    }
}

/// What the arena holds now, in bytes.
#[derive(Debug, Clone, Copy, Default)]
pub struct ArenaStats {
    /// Taken from the system.
    pub mapped: usize,
    /// Of that, in chunks no part of which is in use or in a thread's list.
    pub empty: usize,
    /// The configured budget.
    pub budget: usize,
}

const DEFAULT_BUDGET: usize = 512 << 20;
const CHUNK: usize = HUGE_PAGE;
const PAGES: usize = CHUNK / BUFFER_ALIGN;
/// Classes 0 to 9: blocks of 4 KiB << class.
const CLASSES: usize = PAGES.ilog2() as usize + 1;
/// The class of a block with its own mapping.
const LARGE: u8 = u8::MAX;
/// Bytes a thread keeps per class, at most, before it gives half of them back.
const LOCAL_BYTES: usize = 1 << 20;
/// The smallest budget: so much, and so much for each thread.
const FLOOR: usize = 32 << 20;
const FLOOR_PER_THREAD: usize = 4 << 20;

static ARENA: Arena = Arena {
    budget: AtomicUsize::new(DEFAULT_BUDGET),
    local_bytes: AtomicUsize::new(LOCAL_BYTES),
    hugetlb: AtomicU8::new(0),
    mapped: AtomicUsize::new(0),
    central: Mutex::new(Central::new()),
};

thread_local! {
    static LOCAL: RefCell<Local> = const { RefCell::new(Local { lists: [const { Vec::new() }; CLASSES] }) };
}

/// Sets budget and kind of pages. What was allocated already stays as it is.
pub fn configure(config: &ArenaConfig) {
    ARENA.budget.store(config.budget, Ordering::Relaxed);
    // What lies in all lists of all threads is at most a quarter of the budget.
    let local = config.budget / (4 * CLASSES * config.threads.max(1));
    ARENA.local_bytes.store(local.min(LOCAL_BYTES), Ordering::Relaxed);
    ARENA.hugetlb.store(config.hugetlb.into(), Ordering::Relaxed);
}

/// The smallest budget with which `threads` threads can always go on, whatever lies in their lists, bytes.
pub fn budget_floor(threads: usize) -> usize {
    FLOOR + FLOOR_PER_THREAD * threads
}

/// The configured budget, bytes.
pub fn budget() -> usize {
    ARENA.budget.load(Ordering::Relaxed)
}

pub fn stats() -> ArenaStats {
    ArenaStats {
        mapped: ARENA.mapped.load(Ordering::Relaxed),
        empty: ARENA.central().empty.len() * CHUNK,
        budget: ARENA.budget.load(Ordering::Relaxed),
    }
}

/// Gives back what lies in this thread's lists if others may need it. For a thread that is about to sleep: nobody else
/// can reach its lists.
pub fn settle() {
    if ARENA.mapped.load(Ordering::Relaxed) > ARENA.budget.load(Ordering::Relaxed) / 4 * 3 {
        let _ = LOCAL.try_with(|local| local.borrow_mut().flush());
    }
}

/// The header of a block, kept apart from its bytes. A block at page `n` of a chunk has the chunk's header
/// `n`; the others are unused then.
pub(super) struct Block {
    /// Views of the block; 1 while it is free.
    refs: AtomicU32,
    class: AtomicU8,
    chunk: u32,
    base: NonNull<u8>,
    /// The mapping of a LARGE block, and its length.
    own: Option<(Mapping, usize)>,
}

// SAFETY: `base` is an address of arena memory, which belongs to no thread; the rest is atomic or fixed.
unsafe impl Sync for Block {}

impl Block {
    pub(super) fn base(&self) -> NonNull<u8> {
        self.base
    }
}

/// A reference on a block that is counted.
type BlockRef = NonNull<Block>;

fn header<'a>(block: BlockRef) -> &'a Block {
    // SAFETY: the headers of chunks live for ever; that of a large block until its last reference is
    // released, and every caller holds one.
    unsafe { block.as_ref() }
}

pub(super) fn retain(block: BlockRef) {
    header(block).refs.fetch_add(1, Ordering::Relaxed);
}

pub(super) fn is_unique(block: BlockRef) -> bool {
    header(block).refs.load(Ordering::Acquire) == 1
}

/// Drops a reference; the last one frees the block.
pub(super) fn release(block: BlockRef) {
    // The only holder may skip the count: nobody else can add to it. A free block's count stays 1.
    if !is_unique(block) {
        if header(block).refs.fetch_sub(1, Ordering::Release) != 1 {
            return;
        }
        fence(Ordering::Acquire);
        header(block).refs.store(1, Ordering::Relaxed);
    }
    match header(block).class.load(Ordering::Relaxed) {
        LARGE => free_large(block),
        class => free(block, class.into()),
    }
}

/// A block of at least `len` bytes, beyond the budget if need be.
pub(super) fn allocate(len: usize) -> BlockRef {
    match take(len, Limit::None) {
        Some(block) => block,
        None => std::alloc::handle_alloc_error(std::alloc::Layout::new::<[u8; CHUNK]>()),
    }
}

/// A block of at least `len` bytes, if the budget allows it.
pub(super) fn try_allocate(len: usize) -> Option<BlockRef> {
    take(len, Limit::Budget)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Limit {
    Budget,
    None,
}

/// The memory that a buffer of `len` bytes takes, bytes.
pub fn footprint(len: usize) -> usize {
    if len > CHUNK { len.next_multiple_of(HUGE_PAGE) } else { BUFFER_ALIGN << class_of(len) }
}

fn class_of(len: usize) -> usize {
    len.div_ceil(BUFFER_ALIGN).max(1).next_power_of_two().ilog2() as usize
}

/// Blocks of a class in a thread's list before it spills: two of the large ones, unless memory is tight.
fn local_max(class: usize) -> usize {
    let (local, block) = (ARENA.local_bytes.load(Ordering::Relaxed), BUFFER_ALIGN << class);
    match local / block {
        0 | 1 if 2 * block <= 4 * local => 2,
        fits => fits,
    }
}

fn take(len: usize, limit: Limit) -> Option<BlockRef> {
    if len > CHUNK {
        return allocate_large(len, limit);
    }
    let class = class_of(len);
    let from_local = |local: &RefCell<Local>| local.borrow_mut().take(class, limit);
    // A thread that is ending has no list any more.
    LOCAL.try_with(from_local).unwrap_or_else(|_| {
        let mut one = Vec::new();
        ARENA.central().take(class, 1, limit, &mut one);
        one.pop()
    })
}

fn free(block: BlockRef, class: usize) {
    if LOCAL.try_with(|local| local.borrow_mut().free(block, class)).is_err() {
        ARENA.central().free(block);
    }
}

/// A thread's free blocks, by class.
struct Local {
    lists: [Vec<BlockRef>; CLASSES],
}

impl Local {
    fn take(&mut self, class: usize, limit: Limit) -> Option<BlockRef> {
        if let Some(block) = self.lists[class].pop() {
            return Some(block);
        }
        let wanted = (local_max(class) / 2).max(1);
        ARENA.central().take(class, wanted, Limit::Budget, &mut self.lists[class]);
        if self.lists[class].is_empty() {
            // What this thread keeps in other classes may be whole chunks.
            self.flush();
            ARENA.central().take(class, 1, limit, &mut self.lists[class]);
        }
        self.lists[class].pop()
    }

    fn free(&mut self, block: BlockRef, class: usize) {
        let list = &mut self.lists[class];
        list.push(block);
        let max = local_max(class);
        if list.len() > max {
            let mut central = ARENA.central();
            // The blocks that were used least recently are the first.
            list.drain(..(max / 2).max(1)).for_each(|block| central.free(block));
        }
    }

    fn flush(&mut self) {
        let mut central = ARENA.central();
        self.lists.iter_mut().flat_map(|list| list.drain(..)).for_each(|block| central.free(block));
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        self.flush();
    }
}

struct Arena {
    budget: AtomicUsize,
    /// Bytes a thread keeps per class.
    local_bytes: AtomicUsize,
    hugetlb: AtomicU8,
    mapped: AtomicUsize,
    central: Mutex<Central>,
}

impl Arena {
    fn central(&self) -> MutexGuard<'_, Central> {
        // No code under the lock leaves the lists inconsistent when it panics.
        self.central.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts `len` more bytes as mapped, unless that exceeds the limit.
    fn reserve(&self, len: usize, limit: Limit) -> bool {
        let budget = match limit {
            Limit::Budget => self.budget.load(Ordering::Relaxed),
            Limit::None => usize::MAX,
        };
        let add = |mapped: usize| mapped.checked_add(len).filter(|sum| *sum <= budget);
        self.mapped.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).is_ok()
    }

    fn map(&self, len: usize, limit: Limit) -> Option<Mapping> {
        if !self.reserve(len, limit) {
            return None;
        }
        let mapping = Mapping::new(len, self.hugetlb.load(Ordering::Relaxed) != 0).ok();
        if mapping.is_none() {
            self.mapped.fetch_sub(len, Ordering::Relaxed);
        }
        mapping
    }
}

/// What the threads share: all chunks, and those that have free blocks.
struct Central {
    chunks: Vec<Chunk>,
    /// Chunks with at least one free and one used block, by class.
    partial: [Vec<u32>; CLASSES],
    empty: Vec<u32>,
    /// Empty chunks whose memory went back to the system because more than the budget was mapped.
    returned: Vec<u32>,
}

struct Chunk {
    headers: &'static [Block],
    class: usize,
    /// Pages at which free blocks begin.
    free: Vec<u16>,
}

// SAFETY: the pointers of the lists name blocks, which are Sync.
unsafe impl Send for Local {}

impl Central {
    const fn new() -> Central {
        Central {
            chunks: Vec::new(),
            partial: [const { Vec::new() }; CLASSES],
            empty: Vec::new(),
            returned: Vec::new(),
        }
    }

    /// Moves up to `count` free blocks to `out`, at least one if the limit allows it. Maps a chunk only when
    /// there is no free block.
    fn take(&mut self, class: usize, count: usize, limit: Limit, out: &mut Vec<BlockRef>) {
        let chunk = match self.partial[class].last() {
            Some(chunk) => *chunk,
            None => {
                let Some(chunk) = self.empty.pop().or_else(|| self.map_chunk(limit)) else { return };
                self.assign(chunk, class);
                chunk
            }
        };
        let entry = &mut self.chunks[chunk as usize];
        let rest = entry.free.len().saturating_sub(count.max(1));
        let headers = entry.headers;
        out.extend(entry.free.drain(rest..).map(|page| NonNull::from(&headers[usize::from(page)])));
        if rest == 0 {
            self.partial[class].pop();
        }
    }

    fn free(&mut self, block: BlockRef) {
        let header = header(block);
        let chunk = header.chunk;
        let entry = &mut self.chunks[chunk as usize];
        let offset = header.base.as_ptr().addr() - entry.headers[0].base.as_ptr().addr();
        entry.free.push((offset / BUFFER_ALIGN) as u16);
        let partial = &mut self.partial[entry.class];
        if entry.free.len() == 1 {
            partial.push(chunk);
        }
        if entry.free.len() == PAGES >> entry.class {
            partial.retain(|other| *other != chunk);
            self.retire(chunk);
        }
    }

    /// Keeps a chunk that has become empty, or only its address while more than the budget is mapped.
    fn retire(&mut self, chunk: u32) {
        self.empty.push(chunk);
        if ARENA.mapped.load(Ordering::Relaxed) > ARENA.budget.load(Ordering::Relaxed) {
            self.give_back(1);
        }
    }

    /// Returns the memory of up to `count` empty chunks to the system.
    fn give_back(&mut self, count: usize) {
        for _ in 0..count {
            let Some(chunk) = self.empty.pop() else { return };
            let base = self.chunks[chunk as usize].headers[0].base;
            // SAFETY: a whole chunk, no block of which is in use; it reads as zeros when it is used again.
            if unsafe { libc::madvise(base.as_ptr().cast(), CHUNK, libc::MADV_DONTNEED) } != 0 {
                return self.empty.push(chunk);
            }
            ARENA.mapped.fetch_sub(CHUNK, Ordering::Relaxed);
            self.returned.push(chunk);
        }
    }

    /// Cuts an empty chunk into blocks of a class.
    fn assign(&mut self, chunk: u32, class: usize) {
        let entry = &mut self.chunks[chunk as usize];
        entry.class = class;
        entry.free.clear();
        // The lowest addresses are given out first.
        entry.free.extend((0..PAGES as u16).step_by(1 << class).rev());
        for page in &entry.free {
            entry.headers[usize::from(*page)].class.store(class as u8, Ordering::Relaxed);
        }
        self.partial[class].push(chunk);
    }

    fn map_chunk(&mut self, limit: Limit) -> Option<u32> {
        if !self.returned.is_empty() && ARENA.reserve(CHUNK, limit) {
            return self.returned.pop();
        }
        let mapping = ARENA.map(CHUNK, limit)?;
        let base = mapping.base();
        // Chunks are reused for as long as the process lives.
        std::mem::forget(mapping);
        let chunk = self.chunks.len() as u32;
        let headers = (0..PAGES).map(|page| Block {
            refs: AtomicU32::new(1),
            class: AtomicU8::new(0),
            chunk,
            // SAFETY: page `page` of a mapping of PAGES pages.
            base: unsafe { base.add(page * BUFFER_ALIGN) },
            own: None,
        });
        let headers: &'static [Block] = Vec::leak(headers.collect());
        self.chunks.push(Chunk { headers, class: 0, free: Vec::with_capacity(PAGES) });
        Some(chunk)
    }
}

fn allocate_large(len: usize, limit: Limit) -> Option<BlockRef> {
    let len = len.checked_next_multiple_of(HUGE_PAGE)?;
    let mapping = ARENA.map(len, limit).or_else(|| {
        // Chunks that lie empty count as mapped; they can make room.
        let _ = LOCAL.try_with(|local| local.borrow_mut().flush());
        ARENA.central().give_back(len / CHUNK);
        ARENA.map(len, limit)
    })?;
    let (refs, class, base) = (AtomicU32::new(1), AtomicU8::new(LARGE), mapping.base());
    let block = Block { refs, class, chunk: u32::MAX, base, own: Some((mapping, len)) };
    Some(NonNull::from(Box::leak(Box::new(block))))
}

fn free_large(block: BlockRef) {
    // SAFETY: a LARGE block's header comes from Box::leak, and the last reference was just released.
    let mut block = unsafe { Box::from_raw(block.as_ptr()) };
    if let Some((mapping, len)) = block.own.take() {
        drop(mapping);
        ARENA.mapped.fetch_sub(len, Ordering::Relaxed);
    }
}
