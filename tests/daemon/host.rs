//! A host that is connected to an exported volume or snapshot.
#![forbid(unsafe_code)]

use super::Daemon;
use rimrock::host::{ControllerOptions, Namespace, blocking};
use rimrock::nvme::Status;
use serde_json::json;

/// Bytes of the blocks that these hosts read and write.
pub const BLOCK: usize = 4096;

/// Connected until it is dropped.
pub struct Host {
    /// For those who expect the connection to break.
    pub controller: blocking::BlockingController,
    /// What is exported.
    pub namespace: Namespace,
}

impl Host {
    /// Exports the volume or snapshot, if it is not yet, and connects.
    pub fn connect(daemon: &Daemon, name: &str) -> Host {
        let exported = daemon.call("volume_export", json!({ "name": name }));
        let line = exported["connect"][0].as_str().unwrap().to_owned();
        let word_after = |flag: &str| {
            let mut words = line.split(' ').skip_while(|word| *word != flag).skip(1);
            words.next().unwrap_or_else(|| panic!("no {flag} in '{line}'")).to_owned()
        };
        let address = format!("{}:{}", word_after("-a"), word_after("-s")).parse().unwrap();
        let options = ControllerOptions::new(uuid::Uuid::new_v4());
        let controller = blocking::connect(address, &word_after("-n"), &options).unwrap();
        let namespace = blocking::now(controller.namespace(1)).unwrap();
        assert_eq!(namespace.block_bytes, BLOCK as u32);
        Host { controller, namespace }
    }

    /// Reads blocks.
    pub fn read(&self, first: u64, blocks: usize) -> Result<Vec<u8>, Status> {
        let buffer = vec![0; blocks * BLOCK];
        let (result, bytes) = blocking::now(self.controller.read(&self.namespace, first, buffer));
        result.map(|()| bytes).map_err(|error| error.status().expect("a status"))
    }

    /// Writes whole blocks.
    pub fn write(&self, first: u64, bytes: Vec<u8>) -> Result<(), Status> {
        let result = blocking::now(self.controller.write(&self.namespace, first, bytes, false));
        result.map_err(|error| error.status().expect("a status"))
    }

    /// Makes what was written durable.
    pub fn flush(&self) {
        blocking::now(self.controller.flush(&self.namespace)).unwrap();
    }

    /// Gives the space of blocks back.
    pub fn deallocate(&self, first: u64, blocks: u32) {
        blocking::now(self.controller.deallocate(&self.namespace, &[(first, blocks)])).unwrap();
    }
}

/// What the `version`-th write puts into a block; no two blocks are alike.
pub fn content(block: u64, version: u64) -> Vec<u8> {
    let word =
        |at: u64| ((block << 32) | version).wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(at << 1 | 1);
    (0..BLOCK as u64 / 8).flat_map(|at| word(at).to_le_bytes()).collect()
}

/// Several blocks of it.
pub fn contents(first: u64, blocks: u64, version: u64) -> Vec<u8> {
    (first..first + blocks).flat_map(|block| content(block, version)).collect()
}
