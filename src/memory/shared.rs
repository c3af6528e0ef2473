//! Memory that several threads copy into and out of at once: the store of a ram device.
//!
//! Hosts may race on the same blocks of a raw device, as they may on a real drive. No reference to these
//! bytes ever exists: they are reached by raw copies only, so a race can mix old and new bytes in what is
//! read (as a drive may, beyond its atomic unit) and can do nothing else.

use std::io;
use std::ptr::NonNull;

use super::mapping::Mapping;

const PAGE: usize = 4096;

/// An anonymous, zero-filled mapping of fixed length, 2 MiB-aligned, backed by huge pages where possible.
/// Pages are taken from the system when they are first written.
pub struct SharedRegion {
    mapping: Mapping,
    len: usize,
}

impl SharedRegion {
    /// Maps `len` bytes. Fails with the system's error when the address space or overcommit limit refuses.
    pub fn new(len: usize) -> io::Result<SharedRegion> {
        Ok(SharedRegion { mapping: Mapping::new(len, false)?, len })
    }

    /// Takes all pages from the system now, so that first writes cost no more than later ones.
    pub fn populate(&self) -> io::Result<()> {
        self.mapping.populate(self.len)
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
        unsafe { copy(src.as_ptr(), dst.as_mut_ptr(), dst.len()) };
    }

    /// Copies `src` to `offset`. Panics when the range is out of bounds.
    pub fn copy_in(&self, offset: usize, src: &[u8]) {
        let dst = self.at(offset, src.len());
        // SAFETY: `at` checked the destination range; `src` is outside the mapping.
        unsafe { copy(src.as_ptr(), dst.as_ptr(), src.len()) };
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
        unsafe { clear(dst.as_ptr(), len) };
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
        unsafe { self.mapping.base().add(offset) }
    }
}

/// Copies bytes one of whose sides other threads may be writing. To the compiler this is machine code it
/// cannot see into, so that, unlike with `ptr::copy`, no assumption of exclusive access can be built on it.
///
/// # Safety
/// Both ranges are mapped, writable for `dst`, and do not overlap.
#[cfg(target_arch = "x86_64")]
unsafe fn copy(src: *const u8, dst: *mut u8, len: usize) {
    // SAFETY: the caller's; the direction flag is clear by the ABI, and the registers are declared.
    unsafe {
        std::arch::asm!(
            "rep movsb",
            inout("rcx") len => _,
            inout("rsi") src => _,
            inout("rdi") dst => _,
            options(nostack, preserves_flags)
        );
    }
}

/// As above, a byte at a time through volatile accesses.
///
/// # Safety
/// Both ranges are mapped, writable for `dst`, and do not overlap.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn copy(src: *const u8, dst: *mut u8, len: usize) {
    for index in 0..len {
        // SAFETY: `index < len` of a mapped range.
        let from = unsafe { src.add(index) };
        // SAFETY: as above.
        let byte = unsafe { from.read_volatile() };
        // SAFETY: `index < len` of a mapped, writable range.
        let to = unsafe { dst.add(index) };
        // SAFETY: as above.
        unsafe { to.write_volatile(byte) };
    }
}

/// Zeroes bytes that other threads may be copying, opaque to the compiler as [`copy`] is.
///
/// # Safety
/// The range is mapped and writable.
#[cfg(target_arch = "x86_64")]
unsafe fn clear(dst: *mut u8, len: usize) {
    // SAFETY: the caller's; the direction flag is clear by the ABI, and the registers are declared.
    unsafe {
        std::arch::asm!(
            "rep stosb",
            inout("rcx") len => _,
            inout("rdi") dst => _,
            in("al") 0u8,
            options(nostack, preserves_flags)
        );
    }
}

/// As above, a byte at a time through volatile accesses.
///
/// # Safety
/// The range is mapped and writable.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn clear(dst: *mut u8, len: usize) {
    for index in 0..len {
        // SAFETY: `index < len` of a mapped range.
        let to = unsafe { dst.add(index) };
        // SAFETY: as above, and writable.
        unsafe { to.write_volatile(0) };
    }
}
