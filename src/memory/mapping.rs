//! Anonymous memory from the system, aligned for huge pages.

use std::io;
use std::ptr::{NonNull, null_mut};

pub(super) const HUGE_PAGE: usize = 2 << 20;
/// How much of a mapping goes back to the system at a time.
const RELEASE_STEP: usize = 64 << 20;

/// A private, zero-filled mapping that begins at a multiple of 2 MiB. Pages are taken from the system when
/// they are first touched, as huge ones where it can.
pub(super) struct Mapping {
    base: NonNull<u8>,
    map_base: NonNull<u8>,
    map_len: usize,
}

// SAFETY: a mapping belongs to the process, not to a thread; it gives out no more than an address.
unsafe impl Send for Mapping {}
// SAFETY: as for Send.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps at least `len` bytes. With `hugetlb`, from the pool of reserved huge pages while it has some.
    pub(super) fn new(len: usize, hugetlb: bool) -> io::Result<Mapping> {
        let out_of_memory = || io::Error::from_raw_os_error(libc::ENOMEM);
        if hugetlb && let Some(whole) = len.checked_next_multiple_of(HUGE_PAGE) {
            // Reserved here and now: without MAP_NORESERVE a huge page that is missing fails the mapping
            // and not, by SIGBUS, its first use.
            if let Ok(base) = map(whole, libc::MAP_HUGETLB) {
                return Ok(Mapping { base, map_base: base, map_len: whole });
            }
        }
        let map_len = len.checked_add(HUGE_PAGE).ok_or_else(out_of_memory)?;
        let map_base = map(map_len, libc::MAP_NORESERVE)?;
        let start = map_base.as_ptr().addr();
        // SAFETY: less than HUGE_PAGE is skipped, and the mapping is HUGE_PAGE longer than asked for.
        let base = unsafe { map_base.add(start.next_multiple_of(HUGE_PAGE) - start) };
        // SAFETY: the range lies in the mapping made above. Advice only: an error costs speed, nothing else.
        let _ = unsafe { libc::madvise(base.as_ptr().cast(), len, libc::MADV_HUGEPAGE) };
        Ok(Mapping { base, map_base, map_len })
    }

    /// Takes the first `len` bytes' pages from the system now rather than at their first use.
    ///
    /// A huge page at a time: the system holds the lock on this process's address space throughout one call, and
    /// whoever maps or unmaps memory meanwhile, as any thread that allocates may, waits for its end.
    pub(super) fn populate(&self, len: usize) -> io::Result<()> {
        assert!(len <= self.map_len - (self.base.as_ptr().addr() - self.map_base.as_ptr().addr()));
        for start in (0..len).step_by(HUGE_PAGE) {
            let step = HUGE_PAGE.min(len - start);
            // SAFETY: `start` is below `len`, which lies in this mapping.
            let at = unsafe { self.base.add(start) };
            // SAFETY: the range lies in this mapping; no byte of it changes.
            if unsafe { libc::madvise(at.as_ptr().cast(), step, libc::MADV_POPULATE_WRITE) } != 0 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(())
    }

    pub(super) fn base(&self) -> NonNull<u8> {
        self.base
    }
}

fn map(len: usize, flags: i32) -> io::Result<NonNull<u8>> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = flags | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a fresh anonymous mapping at an address of the kernel's choice touches nothing that exists.
    let address = unsafe { libc::mmap(null_mut(), len, protection, flags, -1, 0) };
    if address == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    NonNull::new(address.cast()).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // In steps, for the reason given at `populate`. Those of reserved huge pages may refuse: they go in the end.
        for start in (0..self.map_len).step_by(RELEASE_STEP) {
            let step = RELEASE_STEP.min(self.map_len - start);
            // SAFETY: `start` is below the mapping's length.
            let at = unsafe { self.map_base.add(start) };
            // SAFETY: the range lies in this mapping, of which nobody has a view any more.
            unsafe { libc::madvise(at.as_ptr().cast(), step, libc::MADV_DONTNEED) };
        }
        // SAFETY: exactly the mapping made in `new`; whoever drops it has given up every view of it.
        unsafe { libc::munmap(self.map_base.as_ptr().cast(), self.map_len) };
    }
}
