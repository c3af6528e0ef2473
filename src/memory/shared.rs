//! Memory that several threads copy into and out of at once: the store of a ram device.
//!
//! Hosts may race on the same blocks of a raw device, as they may on a real drive. No reference to these
//! bytes ever exists: they are reached by raw copies only, so a race can mix old and new bytes in what is
//! read (as a drive may, beyond its atomic unit) and can do nothing else.

use std::io;
use std::ptr::{NonNull, null_mut};

const HUGE_PAGE: usize = 2 << 20;
const PAGE: usize = 4096;

/// An anonymous, zero-filled mapping of fixed length, 2 MiB-aligned, backed by huge pages where possible.
/// Pages are taken from the system when they are first written.
pub struct SharedRegion {
    base: NonNull<u8>,
    len: usize,
    map_base: NonNull<u8>,
    map_len: usize,
}

// SAFETY: the mapping belongs to the region, not to a thread.
unsafe impl Send for SharedRegion {}
// SAFETY: all access is by bounds-checked raw copies; no references to the bytes are made.
unsafe impl Sync for SharedRegion {}

impl SharedRegion {
    /// Maps `len` bytes. Fails with the system's error when the address space or overcommit limit refuses.
    pub fn new(len: usize) -> io::Result<SharedRegion> {
        let map_len = len.checked_add(HUGE_PAGE).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a fresh anonymous mapping at an address of the kernel's choice touches nothing that exists.
        let addr = unsafe { libc::mmap(null_mut(), map_len, protection, flags, -1, 0) };
        if addr == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let map_base = NonNull::new(addr.cast::<u8>()).ok_or_else(io::Error::last_os_error)?;
        let skip = map_base.as_ptr().addr().next_multiple_of(HUGE_PAGE) - map_base.as_ptr().addr();
        // SAFETY: `skip < HUGE_PAGE`, and the mapping is HUGE_PAGE longer than `len`.
        let base = unsafe { map_base.add(skip) };
        // SAFETY: the range lies in the mapping made above. Advice only: an error costs speed, nothing else.
        let _ = unsafe { libc::madvise(base.as_ptr().cast(), len, libc::MADV_HUGEPAGE) };
        Ok(SharedRegion { base, len, map_base, map_len })
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Copies `dst.len()` bytes from `offset`. Panics when the range is out of bounds.
    pub fn copy_out(&self, offset: usize, dst: &mut [u8]) {
        let src = self.at(offset, dst.len());
        // SAFETY: `at` checked the source range; `dst` is exclusive and outside the mapping.
        unsafe { std::ptr::copy_nonoverlapping(src.as_ptr(), dst.as_mut_ptr(), dst.len()) };
    }

    /// Copies `src` to `offset`. Panics when the range is out of bounds.
    pub fn copy_in(&self, offset: usize, src: &[u8]) {
        let dst = self.at(offset, src.len());
        // SAFETY: `at` checked the destination range; `src` is outside the mapping.
        unsafe { std::ptr::copy_nonoverlapping(src.as_ptr(), dst.as_ptr(), src.len()) };
    }

    /// Makes the range read as zeros; whole pages go back to the system. Panics when out of bounds.
    pub fn zero(&self, offset: usize, len: usize) {
        let end = offset + len;
        let first_page = offset.next_multiple_of(PAGE).min(end);
        let last_page = (end - end % PAGE).max(first_page);
        self.fill_zero(offset, first_page - offset);
        self.give_back(first_page, last_page - first_page);
        self.fill_zero(last_page, end - last_page);
    }

    fn fill_zero(&self, offset: usize, len: usize) {
        let dst = self.at(offset, len);
        // SAFETY: `at` checked the range.
        unsafe { std::ptr::write_bytes(dst.as_ptr(), 0, len) };
    }

    fn give_back(&self, offset: usize, len: usize) {
        if len == 0 {
            return;
        }
        let start = self.at(offset, len);
        // SAFETY: whole pages inside the mapping; anonymous private pages read as zeros afterwards.
        let rc = unsafe { libc::madvise(start.as_ptr().cast(), len, libc::MADV_DONTNEED) };
        if rc != 0 {
            self.fill_zero(offset, len);
        }
    }

    fn at(&self, offset: usize, len: usize) -> NonNull<u8> {
        assert!(
            offset <= self.len && len <= self.len - offset,
            "{len} bytes at {offset} of a region of {}",
            self.len
        );
        // SAFETY: `offset <= len` of the mapping.
        unsafe { self.base.add(offset) }
    }
}

impl Drop for SharedRegion {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping made in `new`; the region is gone, so nothing can reach it any more.
        unsafe { libc::munmap(self.map_base.as_ptr().cast(), self.map_len) };
    }
}
