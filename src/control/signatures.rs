//! What others have put on a device: the marks of filesystems, partition tables and volume managers.
//!
//! Looked for before a pool is created, so that a mistyped device name does not cost somebody's data. What is not
//! known here is not found; what is found is certain enough to ask first.
#![forbid(unsafe_code)]

use super::devices::OpenDevice;
use super::error::RpcError;
use crate::device::DeviceKind;
use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::FileExt;

/// Bytes at the front of a device that hold every mark of [`FRONT`] and of ZFS's first label.
const FRONT_BYTES: usize = 256 << 10;

/// Marks at fixed places at the front: offset, bytes, and who writes them. The more telling first: a filesystem may
/// lie behind a boot sector.
const FRONT: &[(usize, &[u8], &str)] = &[
    (0x438, &[0x53, 0xef], "an ext filesystem"),
    (0, b"XFSB", "an XFS filesystem"),
    (0x1_0040, b"_BHRfS_M", "a btrfs filesystem"),
    (0, b"LUKS\xba\xbe", "a LUKS volume"),
    (0, b"LABELONE", "an LVM physical volume"),
    (512, b"LABELONE", "an LVM physical volume"),
    (1024, b"LABELONE", "an LVM physical volume"),
    (1536, b"LABELONE", "an LVM physical volume"),
    (0, &MD_MAGIC, "a member of an MD array"),
    (4096, &MD_MAGIC, "a member of an MD array"),
    (4086, b"SWAPSPACE2", "swap space"),
    (512, b"EFI PART", "a GPT partition table"),
    (4096, b"EFI PART", "a GPT partition table"),
    (3, b"NTFS    ", "an NTFS filesystem"),
    (510, &[0x55, 0xaa], "a partition table or boot sector"),
];
const MD_MAGIC: [u8; 4] = 0xa92b_4efc_u32.to_le_bytes();
/// ZFS writes an uberblock every KiB of the second half of its first label.
const ZFS_MAGIC: u64 = 0x00ba_b10c;

/// What lies on a device, judged by its first bytes.
fn at_front(front: &[u8]) -> Option<&'static str> {
    let found =
        FRONT.iter().find(|(offset, mark, _)| front.get(*offset..).is_some_and(|b| b.starts_with(mark)));
    let zfs = || {
        let mut uberblocks = front.chunks_exact(1024).skip(128);
        uberblocks.any(|block| {
            [ZFS_MAGIC.to_le_bytes(), ZFS_MAGIC.to_be_bytes()].iter().any(|m| block.starts_with(m))
        })
    };
    found.map(|(.., what)| *what).or_else(|| zfs().then_some("a member of a ZFS pool"))
}

/// Where the older formats of MD keep their superblock, at the end of a device of `size` bytes.
fn md_at_end(size: u64) -> [Option<u64>; 2] {
    [(size & !0xffff).checked_sub(64 << 10), size.checked_sub(8 << 10).map(|at| at & !0xfff)]
}

fn on_file(path: &str) -> io::Result<Option<&'static str>> {
    let mut file = File::open(path)?;
    let size = file.seek(SeekFrom::End(0))?;
    let read = |at: u64, len: usize| -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; len.min(usize::try_from(size.saturating_sub(at)).unwrap_or(usize::MAX))];
        file.read_exact_at(&mut bytes, at)?;
        Ok(bytes)
    };
    if let Some(what) = at_front(&read(0, FRONT_BYTES)?) {
        return Ok(Some(what));
    }
    for at in md_at_end(size).into_iter().flatten() {
        if read(at, MD_MAGIC.len())? == MD_MAGIC {
            return Ok(Some("a member of an MD array"));
        }
    }
    Ok(None)
}

/// Refuses a device on which something of others lies.
pub async fn refuse_foreign(device: &OpenDevice) -> Result<(), RpcError> {
    let info = device.device.info();
    if info.kind != DeviceKind::Uring {
        return Ok(());
    }
    let path = info.uri.split_once(':').map_or("", |(_, rest)| rest.split('?').next().unwrap_or(""));
    let path = path.to_owned();
    let found = tokio::task::spawn_blocking(move || on_file(&path)).await;
    let found = found.map_err(io::Error::other).and_then(|found| found);
    let name = &device.name;
    match found {
        Ok(None) => Ok(()),
        Ok(Some(what)) => Err(RpcError::refused(libc::EEXIST, format!("device {name} holds {what}"))
            .with("field", "devices")
            .hint("choose another device, or create the pool with force to lose what is there")),
        Err(error) => Err(RpcError::refused(libc::EIO, format!("device {name} cannot be read: {error}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mark_is_found_where_it_lies_and_nowhere_else() {
        let empty = vec![0; FRONT_BYTES];
        assert_eq!(at_front(&empty), None);
        assert_eq!(at_front(&[]), None);
        for (offset, mark, what) in FRONT {
            let mut front = empty.clone();
            front[*offset..offset + mark.len()].copy_from_slice(mark);
            assert_eq!(at_front(&front), Some(*what));
            front[offset + mark.len() - 1] ^= 1;
            assert_eq!(at_front(&front), None, "{what}, one bit off");
        }
        let mut front = empty.clone();
        front[(128 << 10) + 3 * 1024..][..8].copy_from_slice(&ZFS_MAGIC.to_le_bytes());
        assert_eq!(at_front(&front), Some("a member of a ZFS pool"));
    }

    #[test]
    fn md_is_found_at_the_end() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let path = file.path().to_str().unwrap();
        assert_eq!(on_file(path).unwrap(), None);
        for at in [(1 << 20) - (64 << 10), (1 << 20) - (8 << 10)] {
            file.as_file().write_all_at(&MD_MAGIC, at).unwrap();
            assert_eq!(on_file(path).unwrap(), Some("a member of an MD array"));
            file.as_file().write_all_at(&[0; 4], at).unwrap();
        }
    }
}
