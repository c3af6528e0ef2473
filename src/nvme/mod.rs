//! Wire types of NVMe and NVMe/TCP, shared by the target and by the initiator.
//!
//! This room owns the layout of every structure that crosses the network: commands, completions, Identify and log
//! pages, Fabrics commands and NVMe/TCP PDUs. It performs no I/O, allocates almost nothing, reads no clock and keeps
//! no state. It may assume nothing about the bytes it is handed: every structure accepts every bit pattern
//! (`zerocopy::FromBytes`) and is aligned to one byte, so that looking at hostile bytes is always defined; whether
//! the *values* make sense is decided by who uses them.
//!
//! Section numbers refer to these revisions unless a comment says otherwise: **Base** = NVM Express Base Specification
//! 2.0, **NVM** = NVM Command Set Specification 1.0, **TCP** = NVMe/TCP Transport Specification 1.0.
//!
//! Conventions: integers are little endian (`zerocopy::little_endian`), "0's based" values are converted once, by the
//! `parse`/`to_sqe` pair of the command, and bit fields are declared with [`bits::bit_fields`], never shifted by hand.
#![forbid(unsafe_code)]

pub mod base;
pub mod bits;
pub mod command;
pub mod fabrics;
pub mod features;
pub mod identify;
pub mod log;
pub mod nqn;
pub mod persistent;
pub mod status;
pub mod tcp;

pub use base::{Cqe, Sqe};
pub use nqn::{Nqn, NqnError};
pub use status::Status;
pub use zerocopy::little_endian::{U16, U32, U64};

#[cfg(test)]
mod tests;
