//! Rimrock: a storage appliance whose polled reactors keep thin volumes in a snapshot tree and serve
//! them over NVMe/TCP.
//!
//! The rooms, lowest first. A room may name the rooms before it, never those after it:
//! `memory`, `reactor` → `device` → `pool` → `target` → `control` → `cli`;
//! `sim` crashes the pool at every step, under a simulated clock and on simulated devices;
//! `nvme` (wire types) stands beside them and is used by `target` and `host`, `stream` (the send stream) by `cli`,
//! `crc32c` by all that keep or carry bytes.

pub mod cli;
pub mod config;
pub mod control;
pub mod crc32c;
pub mod device;
pub mod host;
pub mod memory;
pub mod nearest;
pub mod nvme;
pub mod pool;
pub mod reactor;
pub mod sim;
pub mod stream;
pub mod target;
pub mod units;
