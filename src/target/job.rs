//! The part of an I/O command that waits for a backend.
//!
//! A queue hands out [`Job`]s and gets [`Done`]s back, in any order; in between the job is a future that owns its buffer,
//! so that the queue may forget it at any time. Dropping it is legal: the backend keeps the buffer until it is done with it.
//!
//! A job can be told to [stop](Stop). What it has not begun to change by then it does not change any more.
#![forbid(unsafe_code)]

mod inspect;

use std::cell::Cell;
use std::rc::Rc;

use super::ana::Path;
use crate::device::IoError;
use crate::memory::{DmaBuf, DmaSlice};
use crate::nvme::status::Status;
use crate::reactor;

/// What is zeroed before a job looks whether it has been stopped, bytes.
const STOP_BYTES: u64 = 64 << 20;

/// A namespace as one queue holds it: cloned for each command without touching what other cores see.
pub type NamespaceRef = Rc<Path>;

pub struct Job {
    /// The command's slot in its queue.
    pub slot: u32,
    pub namespace: NamespaceRef,
    pub work: Work,
    /// The slot's.
    pub stop: Rc<Stop>,
}

/// How a queue and the job in one of its slots tell each other what may still become of the data.
#[derive(Debug, Default)]
pub struct Stop(Cell<Phase>);

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Phase {
    /// Nothing has changed yet.
    #[default]
    Untouched,
    /// The backend may have been given data.
    Changing,
    /// To be given up: nothing has changed.
    StopUntouched,
    /// To be given up as soon as possible: some of it may have changed.
    StopChanging,
}

impl Stop {
    /// For the slot's next job.
    pub fn reset(&self) {
        self.0.set(Phase::Untouched);
    }

    /// Tells the job to give up. True: it has changed nothing and will not.
    pub fn stop(&self) -> bool {
        let untouched = matches!(self.0.get(), Phase::Untouched | Phase::StopUntouched);
        self.0.set(if untouched { Phase::StopUntouched } else { Phase::StopChanging });
        untouched
    }

    /// The job is about to change something. False: it must not.
    fn begin(&self) -> bool {
        if self.is_stopped() {
            return false;
        }
        self.0.set(Phase::Changing);
        true
    }

    fn is_stopped(&self) -> bool {
        matches!(self.0.get(), Phase::StopUntouched | Phase::StopChanging)
    }
}

/// Offsets and lengths are in bytes and lie within the namespace.
pub enum Work {
    /// With `fua` what the backend's cache holds is made durable first (NVM 3.2.4).
    Read {
        offset: u64,
        buf: DmaBuf,
        fua: bool,
    },
    Write {
        offset: u64,
        data: DmaSlice,
        fua: bool,
    },
    /// Of the job's namespace and of `others`.
    Flush {
        others: Vec<NamespaceRef>,
    },
    WriteZeroes {
        offset: u64,
        len: u64,
        deallocate: bool,
        fua: bool,
    },
    Deallocate {
        ranges: Box<[(u64, u64)]>,
    },
    /// Of what is there with what the host has sent, a piece of `scratch`'s size at a time.
    Compare {
        offset: u64,
        expected: DmaSlice,
        scratch: DmaBuf,
        fua: bool,
    },
    /// Reads everything and gives nothing to anybody.
    Verify {
        offset: u64,
        len: u64,
        scratch: DmaBuf,
        fua: bool,
    },
    /// `buf` is as large as all sources together: they are read before anything is written, so what overlaps is copied as
    /// it was.
    Copy {
        sources: Box<[(u64, u64)]>,
        to: u64,
        buf: DmaBuf,
        fua: bool,
    },
    /// A fused pair: both halves have the same range.
    CompareAndWrite {
        offset: u64,
        expected: DmaSlice,
        data: DmaSlice,
        scratch: DmaBuf,
        fua: bool,
    },
}

impl Work {
    /// The medium may be changed by it.
    pub fn is_change(&self) -> bool {
        match self {
            Work::Read { .. } | Work::Flush { .. } | Work::Compare { .. } | Work::Verify { .. } => false,
            Work::Write { .. }
            | Work::WriteZeroes { .. }
            | Work::Deallocate { .. }
            | Work::Copy { .. }
            | Work::CompareAndWrite { .. } => true,
        }
    }
}

pub struct Done {
    pub slot: u32,
    pub status: Status,
    /// Of the second half of a fused pair.
    pub second: Option<Status>,
    /// The buffer of a read, filled if the status is success.
    pub buf: Option<DmaBuf>,
    /// The namespace whose cache holds what this job wrote.
    pub unflushed: Option<NamespaceRef>,
}

/// Does the work.
pub async fn run(job: Job) -> Done {
    let Job { slot, namespace, work, stop } = job;
    let backend = &namespace.backend;
    match work {
        Work::Read { offset, mut buf, fua } => {
            if stop.is_stopped() {
                return aborted(slot);
            }
            if fua && let Err(status) = inspect::settle(&namespace).await {
                return ended(slot, status);
            }
            let result;
            (result, buf) = backend.read(offset, buf).await;
            Done { buf: Some(buf), ..ended(slot, status_of(result, Status::UNRECOVERED_READ_ERROR)) }
        }
        Work::Write { offset, data, fua } => {
            let pass = namespace.pass(offset, data.len() as u64).await;
            if !stop.begin() {
                return aborted(slot);
            }
            let result = namespace.write(offset, data, fua).await;
            drop(pass);
            written(slot, result, fua, namespace)
        }
        Work::Flush { others } => {
            let mut result = namespace.flush().await;
            for other in &others {
                result = result.and(other.flush().await);
            }
            ended(slot, status_of(result, Status::WRITE_FAULT))
        }
        Work::WriteZeroes { offset, len, deallocate, fua } => {
            let pass = namespace.pass(offset, len).await;
            let (mut result, end) = (Ok(()), offset + len);
            for (at, len) in pieces(offset, len) {
                if !stop.begin() {
                    return aborted(slot);
                }
                // The last flush covers them all.
                let is_last = at + len == end;
                result = namespace.write_zeroes(at, len, deallocate, fua && is_last).await;
                if result.is_err() {
                    break;
                }
            }
            drop(pass);
            written(slot, result, fua, namespace)
        }
        Work::Deallocate { ranges } => {
            for &(offset, len) in &ranges {
                let _pass = namespace.pass(offset, len).await;
                if !stop.begin() {
                    return aborted(slot);
                }
                if let Err(error) = backend.deallocate(offset, len).await {
                    return ended(slot, status_of(Err(error), Status::WRITE_FAULT));
                }
                // There may be 256 of them.
                reactor::yield_now().await;
            }
            ended(slot, Status::SUCCESS)
        }
        // Boxed, so that a read or a write needs no room for what these hold.
        Work::Compare { offset, expected, scratch, fua } => {
            let compared =
                Box::pin(inspect::compare(&namespace, &stop, offset, &expected, scratch, fua)).await;
            ended(slot, compared.err().unwrap_or(Status::SUCCESS))
        }
        Work::Verify { offset, len, scratch, fua } => {
            let verified = Box::pin(inspect::verify(&namespace, &stop, offset, len, scratch, fua)).await;
            ended(slot, verified.err().unwrap_or(Status::SUCCESS))
        }
        Work::Copy { sources, to, buf, fua } => {
            let result = Box::pin(inspect::copy(&namespace, &stop, &sources, to, buf, fua)).await;
            let is_cached = result.is_ok() && !fua && namespace.backend.has_write_cache();
            let status = result.err().unwrap_or(Status::SUCCESS);
            Done { unflushed: is_cached.then_some(namespace), ..ended(slot, status) }
        }
        Work::CompareAndWrite { offset, expected, data, scratch, fua } => {
            let exchange =
                inspect::compare_and_write(&namespace, &stop, offset, &expected, data, scratch, fua);
            let (compared, written) = Box::pin(exchange).await;
            let is_cached = written.is_success() && !fua && namespace.backend.has_write_cache();
            let unflushed = is_cached.then_some(namespace);
            Done { second: Some(written), unflushed, ..ended(slot, compared) }
        }
    }
}

fn ended(slot: u32, status: Status) -> Done {
    Done { slot, status, second: None, buf: None, unflushed: None }
}

fn aborted(slot: u32) -> Done {
    ended(slot, Status::ABORT_REQUESTED)
}

fn written(slot: u32, result: Result<(), IoError>, fua: bool, namespace: NamespaceRef) -> Done {
    let is_cached = result.is_ok() && !fua && namespace.backend.has_write_cache();
    let status = status_of(result, Status::WRITE_FAULT);
    Done { unflushed: is_cached.then_some(namespace), ..ended(slot, status) }
}

/// A range in pieces, between which a job may be stopped.
fn pieces(offset: u64, len: u64) -> impl Iterator<Item = (u64, u64)> {
    let count = len.div_ceil(STOP_BYTES);
    (0..count).map(move |piece| {
        let at = piece * STOP_BYTES;
        (offset + at, STOP_BYTES.min(len - at))
    })
}

/// What a host is told of a backend's error. `media` is the status for a medium that failed.
fn status_of(result: Result<(), IoError>, media: Status) -> Status {
    let Err(error) = result else { return Status::SUCCESS };
    match error {
        IoError::OutOfRange => Status::LBA_OUT_OF_RANGE.with_dnr(),
        IoError::WriteProtected => Status::NAMESPACE_WRITE_PROTECTED.with_dnr(),
        IoError::CapacityExceeded => Status::CAPACITY_EXCEEDED.with_dnr(),
        IoError::Unrecovered { .. } => media.with_dnr(),
        // The host tries again, and should.
        IoError::Busy => Status::COMMAND_INTERRUPTED,
        IoError::Gone => Status::INTERNAL_ERROR.with_dnr(),
        IoError::Unsupported => Status::INVALID_OPCODE.with_dnr(),
        IoError::Os(libc::ENOSPC | libc::EDQUOT) => Status::CAPACITY_EXCEEDED.with_dnr(),
        IoError::Os(libc::EROFS | libc::EPERM | libc::EACCES) => Status::NAMESPACE_WRITE_PROTECTED.with_dnr(),
        IoError::Os(libc::EIO | libc::ENODATA | libc::EILSEQ | libc::EBADMSG) => media,
        IoError::Os(libc::EAGAIN | libc::EBUSY | libc::ENOMEM) => Status::COMMAND_INTERRUPTED,
        IoError::Os(_) | IoError::Internal(_) => Status::INTERNAL_ERROR,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_that_was_told_to_stop_knows_whether_it_has_begun() {
        let stop = Stop::default();
        assert!(stop.begin() && stop.begin() && !stop.is_stopped());
        assert!(!stop.stop() && !stop.stop(), "the backend may have data");
        assert!(!stop.begin());
        stop.reset();
        assert!(stop.stop() && stop.stop() && !stop.begin());
        assert!(stop.stop(), "asking to begin is not beginning");
    }

    #[test]
    fn zeroes_are_written_in_pieces_that_cover_the_range() {
        for (offset, len) in [(0, 512), (4096, STOP_BYTES), (512, STOP_BYTES + 512), (0, 5 * STOP_BYTES)] {
            let mut at = offset;
            for (from, len) in pieces(offset, len) {
                assert_eq!(from, at);
                assert!(len > 0 && len <= STOP_BYTES);
                at += len;
            }
            assert_eq!(at, offset + len);
        }
    }

    #[test]
    fn what_is_seldom_done_takes_no_room_from_what_is_done_all_the_time() {
        fn size<F: Future>(_: &impl Fn(Job) -> F) -> usize {
            size_of::<F>()
        }
        let room = size(&run);
        println!("{room} bytes");
        assert!(room <= 3072, "{room} bytes for each command in flight");
    }
}
