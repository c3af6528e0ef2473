//! Where buffers come from.

use std::alloc::Layout;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering, fence};

use super::BUFFER_ALIGN;

/// How much memory buffers may take.
#[derive(Debug, Clone)]
pub struct ArenaConfig {
    /// Bytes that [`super::DmaBuf::try_uninit`] keeps within. Default 512 MiB.
    pub budget: usize,
    /// Take explicit huge pages (MAP_HUGETLB) where the system has free ones. Default false.
    pub hugetlb: bool,
}

impl Default for ArenaConfig {
    fn default() -> ArenaConfig {
        ArenaConfig { budget: DEFAULT_BUDGET, hugetlb: false }
    }
}

/// What the arena holds now.
#[derive(Debug, Clone, Copy, Default)]
pub struct ArenaStats {
    /// Bytes taken from the system.
    pub mapped: usize,
    /// The configured budget in bytes.
    pub budget: usize,
}

const DEFAULT_BUDGET: usize = 512 << 20;

static BUDGET: AtomicUsize = AtomicUsize::new(DEFAULT_BUDGET);
static MAPPED: AtomicUsize = AtomicUsize::new(0);

/// Sets the budget. Buffers that exist already stay.
pub fn configure(config: &ArenaConfig) {
    BUDGET.store(config.budget, Ordering::Relaxed);
}

pub fn stats() -> ArenaStats {
    ArenaStats { mapped: MAPPED.load(Ordering::Relaxed), budget: BUDGET.load(Ordering::Relaxed) }
}

/// The header of one allocation, kept apart from its bytes.
pub(super) struct Block {
    refs: AtomicU32,
    base: NonNull<u8>,
    layout: Layout,
}

impl Block {
    pub(super) fn base(&self) -> NonNull<u8> {
        self.base
    }
}

pub(super) fn allocate(len: usize) -> NonNull<Block> {
    let size = len.max(1).next_multiple_of(BUFFER_ALIGN);
    let layout = Layout::from_size_align(size, BUFFER_ALIGN).expect("a buffer larger than the address space");
    // SAFETY: the layout's size is not zero.
    let base = unsafe { std::alloc::alloc_zeroed(layout) };
    let Some(base) = NonNull::new(base) else { std::alloc::handle_alloc_error(layout) };
    MAPPED.fetch_add(size, Ordering::Relaxed);
    NonNull::from(Box::leak(Box::new(Block { refs: AtomicU32::new(1), base, layout })))
}

pub(super) fn try_allocate(len: usize) -> Option<NonNull<Block>> {
    if MAPPED.load(Ordering::Relaxed) + len > BUDGET.load(Ordering::Relaxed) {
        return None;
    }
    Some(allocate(len))
}

pub(super) fn retain(block: NonNull<Block>) {
    // SAFETY: the caller's view keeps the block alive.
    let header = unsafe { block.as_ref() };
    header.refs.fetch_add(1, Ordering::Relaxed);
}

pub(super) fn is_unique(block: NonNull<Block>) -> bool {
    // SAFETY: the caller's view keeps the block alive.
    let header = unsafe { block.as_ref() };
    header.refs.load(Ordering::Acquire) == 1
}

pub(super) fn release(block: NonNull<Block>) {
    // SAFETY: the caller's view keeps the block alive until this call has dropped its reference.
    let header = unsafe { block.as_ref() };
    if header.refs.fetch_sub(1, Ordering::Release) != 1 {
        return;
    }
    fence(Ordering::Acquire);
    MAPPED.fetch_sub(header.layout.size(), Ordering::Relaxed);
    // SAFETY: the last reference is gone; base and layout are those of the allocation.
    unsafe { std::alloc::dealloc(header.base.as_ptr(), header.layout) };
    // SAFETY: the header came from Box::leak and nobody else can reach it now.
    drop(unsafe { Box::from_raw(block.as_ptr()) });
}
