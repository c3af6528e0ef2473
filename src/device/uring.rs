//! `uring:/path`: a file or a block device, through each reactor's io_uring, past the page cache.
//!
//! Owns: the descriptor, opened with O_DIRECT and locked against other processes for as long as the device
//! or one of its operations lives.
//!
//! Survives a crash: what was flushed. A file's size is set, and its name made durable, when it is created.

#![forbid(unsafe_code)]

mod open;

use std::io;
use std::sync::atomic::{AtomicU8, Ordering};

use super::IoError;
use crate::memory::{self, BUFFER_ALIGN, DmaBuf, DmaSlice};
use crate::reactor::ring::{self, RingFile};
use crate::reactor::yield_now;

pub(super) use open::open;

/// Parts of one vectored write, the kernel's UIO_MAXIOV.
const PARTS_MAX: usize = 1024;

pub(super) struct Uring {
    file: RingFile,
    block_size: u32,
    /// Memory addresses must be multiples of this.
    memory_align: usize,
    zeroing: Zeroing,
}

/// The best way to zero a range that has not been refused yet, as an index into `WAYS`.
struct Zeroing {
    write_zeroes: AtomicU8,
    discard: AtomicU8,
}

#[derive(Clone, Copy)]
enum Way {
    Fallocate(i32),
    WriteOut,
    Refuse,
}

const PUNCH: Way = Way::Fallocate(libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE);
const ZERO: Way = Way::Fallocate(libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE);

/// Zero Range keeps the space of a file allocated, so that later writes cannot run out of it.
const WRITE_ZEROES_WAYS: [Way; 3] = [ZERO, PUNCH, Way::WriteOut];
/// Writing zeros out gives nothing back, so a discard that cannot punch is refused.
const DISCARD_WAYS: [Way; 2] = [PUNCH, Way::Refuse];

impl Uring {
    fn new(file: RingFile, block_size: u32, memory_align: usize) -> Uring {
        let zeroing = Zeroing { write_zeroes: AtomicU8::new(0), discard: AtomicU8::new(0) };
        Uring { file, block_size, memory_align, zeroing }
    }

    pub(super) fn refuse_discards(&self) {
        self.zeroing.discard.store(DISCARD_WAYS.len() as u8 - 1, Ordering::Relaxed);
    }

    pub(super) async fn read(&self, offset: u64, buf: DmaBuf) -> (Result<(), IoError>, DmaBuf) {
        if buf.is_aligned(self.memory_align) {
            return self.read_aligned(offset, buf).await;
        }
        let mut buf = buf;
        let (result, bounce) = self.read_aligned(offset, DmaBuf::uninit(buf.len())).await;
        if result.is_ok() {
            buf.copy_from_slice(&bounce);
        }
        (result, buf)
    }

    async fn read_aligned(&self, offset: u64, mut buf: DmaBuf) -> (Result<(), IoError>, DmaBuf) {
        let mut done = 0;
        while done < buf.len() {
            let at = offset + done as u64;
            let (result, back) = ring::read(&self.file, at, buf, done).await;
            buf = back;
            match self.progress(result, at).await {
                Ok(count) => done += count,
                Err(error) => return (Err(error), buf),
            }
        }
        (Ok(()), buf)
    }

    pub(super) async fn write(&self, offset: u64, data: DmaSlice) -> Result<(), IoError> {
        let mut rest = match data.is_aligned(self.memory_align) {
            true => data,
            false => DmaSlice::copy_of(&data),
        };
        let mut at = offset;
        while !rest.is_empty() {
            let result = ring::write(&self.file, at, rest.clone()).await;
            let count = self.progress(result, at).await?;
            rest.advance(count);
            at += count as u64;
        }
        Ok(())
    }

    pub(super) async fn write_vectored(&self, offset: u64, data: Vec<DmaSlice>) -> Result<(), IoError> {
        let unit = self.block_size as usize;
        let direct = |part: &DmaSlice| part.is_aligned(self.memory_align) && part.len().is_multiple_of(unit);
        if !data.iter().all(direct) {
            return self.write(offset, gather(&data)).await;
        }
        let mut at = offset;
        let mut parts = data;
        while !parts.is_empty() {
            let batch = parts[..parts.len().min(PARTS_MAX)].to_vec();
            let result = ring::writev(&self.file, at, batch).await;
            let count = self.progress(result, at).await?;
            at += count as u64;
            advance(&mut parts, count);
        }
        Ok(())
    }

    pub(super) async fn flush(&self) -> Result<(), IoError> {
        ring::fdatasync(&self.file).await.map_err(|error| io_error(&error, 0))
    }

    /// Whether the last that is known of discards is that they work.
    pub(super) fn can_discard(&self) -> bool {
        !matches!(DISCARD_WAYS[usize::from(self.zeroing.discard.load(Ordering::Relaxed))], Way::Refuse)
    }

    pub(super) async fn discard(&self, offset: u64, len: u64) -> Result<(), IoError> {
        self.zero(offset, len, &DISCARD_WAYS, &self.zeroing.discard).await
    }

    pub(super) async fn write_zeroes(&self, offset: u64, len: u64) -> Result<(), IoError> {
        self.zero(offset, len, &WRITE_ZEROES_WAYS, &self.zeroing.write_zeroes).await
    }

    /// Zeroes a range in the best way that works here, remembering which ones do not.
    async fn zero(&self, offset: u64, len: u64, ways: &[Way], best: &AtomicU8) -> Result<(), IoError> {
        if len == 0 {
            return Ok(());
        }
        loop {
            let index = best.load(Ordering::Relaxed);
            match ways[usize::from(index)] {
                Way::Fallocate(mode) => match ring::fallocate(&self.file, mode, offset, len).await {
                    Ok(()) => return Ok(()),
                    Err(error) if is_unsupported(&error) => best.store(index + 1, Ordering::Relaxed),
                    Err(error) if is_transient(&error) => yield_now().await,
                    Err(error) => return Err(io_error(&error, offset)),
                },
                Way::WriteOut => return self.write_out_zeros(offset, len).await,
                Way::Refuse => return Err(IoError::Unsupported),
            }
        }
    }

    async fn write_out_zeros(&self, offset: u64, len: u64) -> Result<(), IoError> {
        let mut done = 0;
        while done < len {
            let zeros = memory::zeros(usize::try_from(len - done).unwrap_or(usize::MAX));
            let part = zeros.len() as u64;
            self.write(offset + done, zeros).await?;
            done += part;
        }
        Ok(())
    }

    /// Whole blocks a transfer at `at` moved; 0: try again. A transfer that moved less than a block without
    /// an error will not move more: the file was cut short behind our back.
    async fn progress(&self, result: io::Result<usize>, at: u64) -> Result<usize, IoError> {
        let unit = self.block_size as usize;
        match result {
            Ok(count) if count >= unit => Ok(count - count % unit),
            Ok(_) => Err(IoError::Unrecovered { offset: at }),
            Err(error) if is_transient(&error) => {
                yield_now().await;
                Ok(0)
            }
            Err(error) => Err(io_error(&error, at)),
        }
    }
}

/// One buffer with the contents of all parts.
fn gather(parts: &[DmaSlice]) -> DmaSlice {
    let mut whole = DmaBuf::uninit(parts.iter().map(|part| part.len()).sum());
    let mut at = 0;
    for part in parts {
        whole[at..at + part.len()].copy_from_slice(part);
        at += part.len();
    }
    whole.freeze()
}

/// Drops the first `count` bytes of a list of parts.
fn advance(parts: &mut Vec<DmaSlice>, mut count: usize) {
    let whole = parts
        .iter()
        .take_while(|part| {
            let fits = part.len() <= count;
            count -= if fits { part.len() } else { 0 };
            fits
        })
        .count();
    parts.drain(..whole);
    if let Some(first) = parts.first_mut() {
        first.advance(count);
    }
}

fn is_transient(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EINTR))
}

fn is_unsupported(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOSYS | libc::ENOTTY))
}

/// The one place where errno values of file I/O get their meaning.
fn io_error(error: &io::Error, offset: u64) -> IoError {
    match error.raw_os_error() {
        Some(libc::EIO | libc::EILSEQ | libc::ENODATA | libc::EREMOTEIO) => IoError::Unrecovered { offset },
        Some(libc::ENOSPC | libc::EDQUOT | libc::EFBIG) => IoError::CapacityExceeded,
        Some(libc::EROFS | libc::EPERM) => IoError::WriteProtected,
        Some(libc::EBUSY | libc::ENOMEM | libc::ENOBUFS) => IoError::Busy,
        Some(libc::ENODEV | libc::ENXIO | libc::ESHUTDOWN) => IoError::Gone,
        Some(libc::EOPNOTSUPP) => IoError::Unsupported,
        Some(errno) => IoError::Os(errno),
        None => IoError::Internal("a device was used outside of a reactor"),
    }
}

/// The alignment that always works.
const SAFE_ALIGN: usize = BUFFER_ALIGN;
