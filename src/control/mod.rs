//! The control socket: JSON-RPC 2.0 over a Unix socket, and the methods behind it.
//!
//! Owns what no lower room does: the names of open devices, which volume is exported where, and the words in
//! which all of it is asked for. Runs on the control thread alone and touches reactors only through the handles of
//! the rooms below. What must survive a crash lies in the pools' catalogs, never here.
//!
//! A call's way: bytes → [`framing`] → [`jsonrpc`] → [`schema`] (against the declaration in the method table) → a
//! handler → bytes.
#![forbid(unsafe_code)]

mod advertise;
mod changes;
mod daemon;
mod deleted;
mod devices;
mod discovery;
pub mod error;
mod events;
mod exports;
pub mod framing;
pub mod jsonrpc;
mod lookup;
mod methods;
pub mod names;
mod pools;
mod restore;
pub mod schema;
pub mod server;
mod signatures;
pub mod table;
mod transfers;
mod transport;

pub use daemon::{Daemon, StartError};
