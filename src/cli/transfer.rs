//! `rimrock snapshot send` and `rimrock snapshot receive`: snapshots as files and through pipes.
//!
//! The control socket carries no data. The daemon shows the snapshot, or the volume that is being received, as a
//! namespace to this one process, and says which ranges there are, part by part; the data comes and goes over NVMe/TCP
//! ([`link`]), with several commands under way. What reads or writes the stream runs on a thread of its own, so that
//! checksums are computed while data moves. Memory does not depend on what is sent.
//!
//! A transfer that is not ended goes with this process: the daemon sees its connection end.
#![forbid(unsafe_code)]

mod check;
mod input;
mod link;
mod output;
mod proof;
mod receive;
mod send;

pub use receive::SnapshotReceive;
pub use send::SnapshotSend;

use super::client::{Arguments, call};
use super::{Common, Failure};
use crate::stream::DATA_MAX;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::Value;
use std::fs::File;
use std::os::fd::AsFd;
use std::time::Duration;

/// The most bytes that a pipe can be given to hold without privileges, by default; unasked it holds 64 KiB.
const PIPE_BYTES: i32 = 1 << 20;
/// How often progress is shown at most.
const SHOW: Duration = Duration::from_millis(200);

/// What one command or record moves: whole blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// The first byte.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
}

/// A range in pieces that end where chunks of the volume end.
fn pieces(offset: u64, length: u64) -> impl Iterator<Item = Piece> {
    let (mut at, end) = (offset, offset + length);
    std::iter::from_fn(move || {
        let next = (at + 1).next_multiple_of(DATA_MAX as u64).min(end);
        let piece = Piece { offset: at, length: next - at };
        at = next;
        (piece.length > 0).then_some(piece)
    })
}

/// A transfer of the daemon's, ended when this goes.
struct Session<'a> {
    common: &'a Common,
    id: String,
}

impl Session<'_> {
    /// Begins one. Also gives the daemon's answer.
    fn begin<'a>(
        common: &'a Common,
        method: &str,
        arguments: Arguments,
    ) -> Result<(Session<'a>, Value), Failure> {
        let by = format!("process {}", std::process::id());
        let answer = call(common, method, arguments.with("by", by))?;
        let id = answer["session"].as_str().unwrap_or_default().to_owned();
        Ok((Session { common, id }, answer))
    }

    /// Parameters that name it.
    fn arguments(&self) -> Arguments {
        Arguments::new().with("session", self.id.as_str())
    }

    /// The daemon has ended it.
    fn forget(mut self) {
        self.id.clear();
    }
}

impl Drop for Session<'_> {
    fn drop(&mut self) {
        if !self.id.is_empty() {
            // A daemon that cannot be reached has ended it, or will.
            drop(call(self.common, "snapshot_transfer_end", self.arguments()));
        }
    }
}

/// A progress bar on standard error, or nothing: when that is no terminal, or when it is not wanted.
fn progress(total: Option<u64>, what: &'static str, quiet: bool) -> ProgressBar {
    let target = if quiet { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
    let bar = ProgressBar::with_draw_target(total, target).with_message(what);
    let form = match total {
        Some(_) => {
            "{msg:10} {bar:30} {percent:>3}% {binary_bytes:>10} of {binary_total_bytes} \
             {binary_bytes_per_sec:>12} {eta:>4} left"
        }
        None => "{msg:10} {spinner} {binary_bytes:>10} {binary_bytes_per_sec:>12}",
    };
    match ProgressStyle::with_template(form) {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

/// Lets a pipe hold as much as it may, so that both its ends wake each other less often. Anything else stays as it is.
fn widen(file: &File) {
    use nix::fcntl::{FcntlArg, fcntl};
    // Not worth a word where it fails: the pipe works all the same.
    let _ = fcntl(file.as_fd(), FcntlArg::F_SETPIPE_SZ(PIPE_BYTES));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_end_where_chunks_end() {
        let mib = 1u64 << 20;
        let cut = |offset, length| pieces(offset, length).map(|p| (p.offset, p.length)).collect::<Vec<_>>();
        assert_eq!(cut(0, 0), []);
        assert_eq!(cut(0, 4096), [(0, 4096)]);
        assert_eq!(cut(0, mib), [(0, mib)]);
        assert_eq!(cut(mib - 4096, 8192), [(mib - 4096, 4096), (mib, 4096)]);
        assert_eq!(cut(4096, 2 * mib), [(4096, mib - 4096), (mib, mib), (2 * mib, 4096)]);
    }
}
