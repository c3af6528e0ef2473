//! The target over real sockets, spoken to byte by byte: what hosts do right, and above all what they do wrong.
//!
//! After every wrong thing the rig's health check must pass: a second host connects, writes and reads back.

mod aborts;
mod ana;
mod association;
mod cache;
mod client;
mod commands;
mod connect;
mod discovery;
mod events;
mod framing;
mod fused;
mod identify;
mod io;
mod limits;
mod persistent_events;
mod scanners;
mod streams;
mod volume;
