//! The part of an I/O command that waits for a backend.
//!
//! A queue hands out [`Job`]s and gets [`Done`]s back, in any order; in between the job is a future that owns its buffer,
//! so that the queue may forget it at any time. Dropping it is legal: the backend keeps the buffer until it is done with it.
#![forbid(unsafe_code)]

use std::rc::Rc;

use super::ana::Path;
use crate::device::IoError;
use crate::memory::{DmaBuf, DmaSlice};
use crate::nvme::status::Status;
use crate::reactor;

/// A namespace as one queue holds it: cloned for each command without touching what other cores see.
pub type NamespaceRef = Rc<Path>;

pub struct Job {
    /// The command's slot in its queue.
    pub slot: u32,
    pub namespace: NamespaceRef,
    pub work: Work,
}

/// Offsets and lengths are in bytes and lie within the namespace.
pub enum Work {
    Read {
        offset: u64,
        buf: DmaBuf,
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
}

pub struct Done {
    pub slot: u32,
    pub status: Status,
    /// The buffer of a read, filled if the status is success.
    pub buf: Option<DmaBuf>,
    /// The namespace whose cache holds what this job wrote.
    pub unflushed: Option<NamespaceRef>,
}

/// Does the work.
pub async fn run(job: Job) -> Done {
    let Job { slot, namespace, work } = job;
    let backend = &namespace.backend;
    match work {
        Work::Read { offset, buf } => {
            let (result, buf) = backend.read(offset, buf).await;
            let status = status_of(result, Status::UNRECOVERED_READ_ERROR);
            Done { slot, status, buf: Some(buf), unflushed: None }
        }
        Work::Write { offset, data, fua } => {
            let result = namespace.write(offset, data, fua).await;
            written(slot, result, fua, namespace)
        }
        Work::Flush { others } => {
            let mut result = namespace.flush().await;
            for other in &others {
                result = result.and(other.flush().await);
            }
            done(slot, result)
        }
        Work::WriteZeroes { offset, len, deallocate, fua } => {
            let result = namespace.write_zeroes(offset, len, deallocate, fua).await;
            written(slot, result, fua, namespace)
        }
        Work::Deallocate { ranges } => {
            for &(offset, len) in &ranges {
                if let Err(error) = backend.deallocate(offset, len).await {
                    return done(slot, Err(error));
                }
                // There may be 256 of them.
                reactor::yield_now().await;
            }
            done(slot, Ok(()))
        }
    }
}

fn done(slot: u32, result: Result<(), IoError>) -> Done {
    Done { slot, status: status_of(result, Status::WRITE_FAULT), buf: None, unflushed: None }
}

fn written(slot: u32, result: Result<(), IoError>, fua: bool, namespace: NamespaceRef) -> Done {
    let is_cached = result.is_ok() && !fua && namespace.backend.has_write_cache();
    Done { unflushed: is_cached.then_some(namespace), ..done(slot, result) }
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
