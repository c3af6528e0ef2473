//! Jobs that look at data before they say or change something: Compare, Verify, Copy, and fused Compare and Write.
#![forbid(unsafe_code)]

use super::{NamespaceRef, Stop, status_of};
use crate::device::IoError;
use crate::memory::{DmaBuf, DmaSlice};
use crate::nvme::status::Status;
use crate::reactor;

/// Makes what the backend's cache holds durable: what is read afterwards is what a loss of power leaves.
pub(super) async fn settle(namespace: &NamespaceRef) -> Result<(), Status> {
    if !namespace.backend.has_write_cache() {
        return Ok(());
    }
    outcome(Box::pin(namespace.flush()).await, Status::WRITE_FAULT)
}

fn outcome(result: Result<(), IoError>, media: Status) -> Result<(), Status> {
    match status_of(result, media) {
        status if status.is_success() => Ok(()),
        status => Err(status),
    }
}

/// Reads the range, as much at a time as `scratch` holds, and shows it to `look`, with its place in the range.
async fn look_through(
    namespace: &NamespaceRef,
    stop: &Stop,
    offset: u64,
    len: u64,
    mut scratch: DmaBuf,
    look: impl Fn(usize, &[u8]) -> Result<(), Status>,
) -> Result<(), Status> {
    let mut at = 0;
    while at < len {
        if stop.is_stopped() {
            return Err(Status::ABORT_REQUESTED);
        }
        scratch.truncate((len - at).min(scratch.len() as u64) as usize);
        let result;
        (result, scratch) = namespace.backend.read(offset + at, scratch).await;
        outcome(result, Status::UNRECOVERED_READ_ERROR)?;
        look(at as usize, &scratch)?;
        at += scratch.len() as u64;
        // What memory does it does at once: others have their turn.
        if at < len {
            reactor::yield_now().await;
        }
    }
    Ok(())
}

pub(super) async fn compare(
    namespace: &NamespaceRef,
    stop: &Stop,
    offset: u64,
    expected: &DmaSlice,
    scratch: DmaBuf,
    fua: bool,
) -> Result<(), Status> {
    if fua {
        settle(namespace).await?;
    }
    let look = |at: usize, found: &[u8]| match expected[at..at + found.len()] == *found {
        true => Ok(()),
        false => Err(Status::COMPARE_FAILURE.with_dnr()),
    };
    look_through(namespace, stop, offset, expected.len() as u64, scratch, look).await
}

pub(super) async fn verify(
    namespace: &NamespaceRef,
    stop: &Stop,
    offset: u64,
    len: u64,
    scratch: DmaBuf,
    fua: bool,
) -> Result<(), Status> {
    if fua {
        settle(namespace).await?;
    }
    look_through(namespace, stop, offset, len, scratch, |_, _| Ok(())).await
}

/// Reads every source, then writes all of it at once: when a source cannot be read nothing has changed.
pub(super) async fn copy(
    namespace: &NamespaceRef,
    stop: &Stop,
    sources: &[(u64, u64)],
    to: u64,
    mut buf: DmaBuf,
    fua: bool,
) -> Result<(), Status> {
    let mut whole: Option<DmaBuf> = None;
    for &(offset, len) in sources {
        if stop.is_stopped() {
            return Err(Status::ABORT_REQUESTED);
        }
        let (result, piece) = namespace.backend.read(offset, buf.split_to(len as usize)).await;
        outcome(result, Status::UNRECOVERED_READ_ERROR)?;
        match &mut whole {
            Some(whole) => whole.unsplit(piece),
            None => whole = Some(piece),
        }
    }
    let data = whole.unwrap_or(buf).freeze();
    let _pass = namespace.pass(to, data.len() as u64).await;
    if !stop.begin() {
        return Err(Status::ABORT_REQUESTED);
    }
    outcome(namespace.write(to, data, fua).await, Status::WRITE_FAULT)
}

/// Nobody else changes the range between the comparison and the end of the write. The statuses of both halves.
pub(super) async fn compare_and_write(
    namespace: &NamespaceRef,
    stop: &Stop,
    offset: u64,
    expected: &DmaSlice,
    data: DmaSlice,
    scratch: DmaBuf,
    fua: bool,
) -> (Status, Status) {
    let _claim = namespace.claim(offset, expected.len() as u64).await;
    if let Err(status) = compare(namespace, stop, offset, expected, scratch, false).await {
        return (status, Status::ABORTED_FAILED_FUSED);
    }
    if !stop.begin() {
        return (Status::ABORT_REQUESTED, Status::ABORTED_FAILED_FUSED);
    }
    let result = namespace.write(offset, data, fua).await;
    (Status::SUCCESS, status_of(result, Status::WRITE_FAULT))
}
