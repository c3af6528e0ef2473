//! [`DmaBuf`] and [`DmaSlice`]: unique and shared views of a part of one arena block.
//!
//! A view is a pointer, a length and one reference on the block. Splitting gives disjoint views of the same
//! block; freezing turns a unique view into a shared one without copying. The invariant all of the unsafe
//! code here rests on, called *the view rule* below: a `DmaBuf`'s bytes are covered by no other view, a
//! `DmaSlice`'s bytes are covered by no `DmaBuf`, and the block lives for as long as any view of it.

use std::fmt;
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;

use super::arena::{self, Block};

/// Unique, mutable bytes that a device may transfer: an aligned block of the arena or a part of one.
pub struct DmaBuf {
    block: NonNull<Block>,
    start: NonNull<u8>,
    len: usize,
}

/// A shared, read-only view of the bytes of a former [`DmaBuf`]. Cloning copies no bytes and allocates nothing.
pub struct DmaSlice {
    block: NonNull<Block>,
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: by the view rule a DmaBuf is the only way to its bytes, and the block's reference count is atomic.
unsafe impl Send for DmaBuf {}
// SAFETY: a shared DmaBuf gives only `&[u8]`.
unsafe impl Sync for DmaBuf {}
// SAFETY: a DmaSlice gives only `&[u8]` of bytes nobody may write (view rule); the count is atomic.
unsafe impl Send for DmaSlice {}
// SAFETY: as for Send.
unsafe impl Sync for DmaSlice {}

/// The longest view that [`zeros`] gives, bytes.
const ZEROS: usize = 256 << 10;

thread_local! {
    static ZERO: DmaSlice = DmaBuf::zeroed(ZEROS).freeze();
}

/// Up to `len` zero bytes, aligned, that take no memory of their own: every view of a thread is of the same bytes.
pub fn zeros(len: usize) -> DmaSlice {
    let view = |zero: &DmaSlice| zero.slice(0..len.min(ZEROS));
    ZERO.try_with(view).unwrap_or_else(|_| DmaBuf::zeroed(len.min(ZEROS)).freeze())
}

impl DmaBuf {
    /// `len` zero bytes, starting at a multiple of 4096. Takes memory beyond the budget when it must.
    pub fn zeroed(len: usize) -> DmaBuf {
        let mut buf = DmaBuf::uninit(len);
        buf.fill(0);
        buf
    }

    /// `len` bytes of unspecified (recycled, but initialised) contents, starting at a multiple of 4096.
    /// Takes memory beyond the budget when it must; the caller fills it before anyone may see it.
    pub fn uninit(len: usize) -> DmaBuf {
        DmaBuf::over(arena::allocate(len), len)
    }

    /// As [`DmaBuf::uninit`], but `None` when the arena's budget is used up: the caller applies back-pressure.
    pub fn try_uninit(len: usize) -> Option<DmaBuf> {
        Some(DmaBuf::over(arena::try_allocate(len)?, len))
    }

    /// A buffer holding a copy of `bytes`.
    pub fn copy_of(bytes: &[u8]) -> DmaBuf {
        let mut buf = DmaBuf::uninit(bytes.len());
        buf.copy_from_slice(bytes);
        buf
    }

    fn over(block: NonNull<Block>, len: usize) -> DmaBuf {
        // SAFETY: a block from the arena is valid until its last reference is released; this view holds one.
        let start = unsafe { block.as_ref() }.base();
        DmaBuf { block, start, len }
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether the first byte's address is a multiple of `align`.
    pub fn is_aligned(&self, align: usize) -> bool {
        self.start.as_ptr().addr().is_multiple_of(align)
    }

    /// Shortens the view to its first `len` bytes; longer lengths change nothing.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Returns `[0, at)`; `self` keeps `[at, len)`. Panics when `at > len`.
    pub fn split_to(&mut self, at: usize) -> DmaBuf {
        let tail = self.split_off(at);
        std::mem::replace(self, tail)
    }

    /// Returns `[at, len)`; `self` keeps `[0, at)`. Panics when `at > len`.
    pub fn split_off(&mut self, at: usize) -> DmaBuf {
        assert!(at <= self.len, "split at {at} of a buffer of {} bytes", self.len);
        arena::retain(self.block);
        // SAFETY: `at <= len`, so the result points into, or one past, the same block.
        let start = unsafe { self.start.add(at) };
        let tail = DmaBuf { block: self.block, start, len: self.len - at };
        self.len = at;
        tail
    }

    /// Appends `other`, which must be the neighbour split off this buffer. Panics otherwise.
    pub fn unsplit(&mut self, other: DmaBuf) {
        assert!(self.block == other.block, "unsplit of parts of two allocations");
        // SAFETY: `len` bytes from `start` belong to this view, so the end is in, or one past, the block.
        let end = unsafe { self.start.add(self.len) };
        assert!(end == other.start, "unsplit of parts that are not neighbours");
        self.len += other.len;
    }

    /// Turns the buffer into a shared, read-only view of the same bytes.
    pub fn freeze(self) -> DmaSlice {
        let this = std::mem::ManuallyDrop::new(self);
        DmaSlice { block: this.block, start: this.start, len: this.len }
    }
}

impl Deref for DmaBuf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: view rule; the arena hands out initialised memory only.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for DmaBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: view rule: these bytes are covered by this view alone, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl Drop for DmaBuf {
    fn drop(&mut self) {
        arena::release(self.block);
    }
}

impl fmt::Debug for DmaBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DmaBuf").field("start", &self.start).field("len", &self.len).finish()
    }
}

impl DmaSlice {
    /// A view of a fresh copy of `bytes`.
    pub fn copy_of(bytes: &[u8]) -> DmaSlice {
        DmaBuf::copy_of(bytes).freeze()
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether the first byte's address is a multiple of `align`.
    pub fn is_aligned(&self, align: usize) -> bool {
        self.start.as_ptr().addr().is_multiple_of(align)
    }

    /// A view of `range` of these bytes. Panics when the range is out of bounds.
    pub fn slice(&self, range: Range<usize>) -> DmaSlice {
        assert!(
            range.start <= range.end && range.end <= self.len,
            "slice {range:?} of a view of {} bytes",
            self.len
        );
        arena::retain(self.block);
        // SAFETY: `range.start <= len`, so the result points into, or one past, the same block.
        let start = unsafe { self.start.add(range.start) };
        DmaSlice { block: self.block, start, len: range.end - range.start }
    }

    /// Returns `[0, at)`; `self` keeps `[at, len)`. Panics when `at > len`.
    pub fn split_to(&mut self, at: usize) -> DmaSlice {
        let head = self.slice(0..at);
        self.advance(at);
        head
    }

    /// Drops the first `count` bytes from the view. Panics when there are fewer.
    pub fn advance(&mut self, count: usize) {
        assert!(count <= self.len, "advance by {count} in a view of {} bytes", self.len);
        // SAFETY: `count <= len`, so the result points into, or one past, the same block.
        self.start = unsafe { self.start.add(count) };
        self.len -= count;
    }

    /// The buffer back for writing, if this is the only view of the whole allocation.
    pub fn try_into_buf(self) -> Result<DmaBuf, DmaSlice> {
        if !arena::is_unique(self.block) {
            return Err(self);
        }
        let this = std::mem::ManuallyDrop::new(self);
        Ok(DmaBuf { block: this.block, start: this.start, len: this.len })
    }
}

impl Clone for DmaSlice {
    fn clone(&self) -> DmaSlice {
        arena::retain(self.block);
        DmaSlice { block: self.block, start: self.start, len: self.len }
    }
}

impl Deref for DmaSlice {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: view rule: initialised bytes that no DmaBuf covers.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl Drop for DmaSlice {
    fn drop(&mut self) {
        arena::release(self.block);
    }
}

impl From<DmaBuf> for DmaSlice {
    fn from(buf: DmaBuf) -> DmaSlice {
        buf.freeze()
    }
}

impl fmt::Debug for DmaSlice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DmaSlice").field("start", &self.start).field("len", &self.len).finish()
    }
}
