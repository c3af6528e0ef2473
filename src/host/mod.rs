//! NVMe/TCP initiator: the other end of `target`, used by tests, the benchmark, import and export, and remote devices.
//!
//! - [`connection`]: one connection as a machine without I/O; everything a target sends is judged there.
#![forbid(unsafe_code)]

pub mod connection;
