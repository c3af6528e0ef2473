//! The newest part of a shard's journal, kept in a file in shared memory until a flush or a commit takes it to the
//! devices.
//!
//! Why: with a write cache, a write is acknowledged before its mapping is on a device. When this process alone dies,
//! the hosts live on, and none of them writes again what was acknowledged: their next flush, answered by the next
//! process, would cover writes that are lost. So the records must outlive the process. They need not outlive the
//! machine: a host that may lose what it did not flush before a power cut expects just that.
//!
//! ```text
//! acknowledged ──▶ stage: block `sequence` at `sequence mod ring`, written again with each record
//! flush        ──▶ the same block, on the devices        recovery: devices first, where they end the stage
//! ```
//!
//! What survives: a kill of the process, not a restart of the machine. A stage left behind by an earlier life of the
//! pool does no harm: its sequences lie below those that recovery asks for, as each opening passes over a whole lap.
#![forbid(unsafe_code)]

use std::fs::{File, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use uuid::Uuid;

use super::pointer::BLOCK_BYTES;

/// Shared memory, by the Filesystem Hierarchy of Linux; emptied when the machine restarts.
const DIRECTORY: &str = "/dev/shm";
/// Read and written by its owner alone.
const MODE: u32 = 0o600;

/// The stage of one shard.
pub struct Stage {
    file: File,
    path: PathBuf,
}

impl Stage {
    /// Opens the stage of a shard, or makes it.
    pub fn open(pool: Uuid, shard: u16) -> io::Result<Stage> {
        Self::open_in(Path::new(DIRECTORY), pool, shard)
    }

    /// The stage that an earlier process left behind, only to be read.
    pub fn peek(pool: Uuid, shard: u16) -> Option<Stage> {
        let path = Path::new(DIRECTORY).join(format!("rimrock-{pool}-{shard}"));
        let file = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW).open(&path).ok()?;
        let metadata = file.metadata().ok()?;
        let ours = metadata.uid() == nix::unistd::geteuid().as_raw();
        (metadata.is_file() && ours && metadata.permissions().mode() & 0o077 == 0)
            .then_some(Stage { file, path })
    }

    fn open_in(directory: &Path, pool: Uuid, shard: u16) -> io::Result<Stage> {
        let path = directory.join(format!("rimrock-{pool}-{shard}"));
        // Anyone may make files there, so it counts only when it is a file of ours that nobody else could write.
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(MODE)
            .custom_flags(libc::O_NOFOLLOW)
            .open(&path)?;
        let metadata = file.metadata()?;
        let ours = metadata.uid() == nix::unistd::geteuid().as_raw();
        if !metadata.is_file() || !ours || metadata.permissions().mode() & 0o077 != 0 {
            return Err(io::Error::new(
                io::ErrorKind::PermissionDenied,
                format!("{} is not a file that only this user can write", path.display()),
            ));
        }
        file.set_permissions(Permissions::from_mode(MODE))?;
        Ok(Stage { file, path })
    }

    /// Writes the block at `place` of the ring.
    pub fn write(&self, place: u64, block: &[u8]) -> io::Result<()> {
        self.file.write_all_at(block, place * BLOCK_BYTES as u64)
    }

    /// The block at `place` of the ring, if one was ever written there. Whether it is whole, its checksum says.
    pub fn read(&self, place: u64) -> Option<[u8; BLOCK_BYTES]> {
        let mut block = [0; BLOCK_BYTES];
        self.file.read_exact_at(&mut block, place * BLOCK_BYTES as u64).ok()?;
        Some(block)
    }

    /// Removes the file: everything in it is on the devices.
    pub fn remove(self) {
        // Left behind, it would only take up memory.
        let _ = std::fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_outlive_the_handle_and_go_with_the_file() {
        let directory = tempfile::tempdir().unwrap();
        let pool = Uuid::from_u128(7);
        let stage = Stage::open_in(directory.path(), pool, 3).unwrap();
        assert_eq!(stage.read(5), None);
        stage.write(5, &[9; BLOCK_BYTES]).unwrap();
        drop(stage);
        let stage = Stage::open_in(directory.path(), pool, 3).unwrap();
        assert_eq!(stage.read(5), Some([9; BLOCK_BYTES]));
        assert_eq!(stage.read(4), Some([0; BLOCK_BYTES]));
        assert_eq!(stage.read(6), None);
        stage.remove();
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_file_that_others_can_write_or_a_link_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let (pool, path) = (Uuid::nil(), directory.path().join(format!("rimrock-{}-0", Uuid::nil())));
        std::fs::write(&path, b"x").unwrap();
        std::fs::set_permissions(&path, Permissions::from_mode(0o666)).unwrap();
        assert!(Stage::open_in(directory.path(), pool, 0).is_err());
        std::fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("/dev/null", &path).unwrap();
        assert!(Stage::open_in(directory.path(), pool, 0).is_err());
    }
}
