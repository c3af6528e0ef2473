//! Devices: fixed-size stores of blocks, all behind one handle.
//!
//! Owns: the file, block device or memory that holds the bytes, and the lock that keeps others off it. A
//! [`Device`] is opened by URI on the control thread, then used on any reactor: each reactor drives it
//! through its own ring.
//!
//! May assume: nothing about who overlaps with whom; ordering is the caller's. What a device promises:
//! a write that was acknowledged is read back; after [`Device::flush`] has returned, everything acknowledged
//! before it was called survives a loss of power.
//!
//! A kind is one file with the same set of functions and one arm in each `match` of this one.

#![forbid(unsafe_code)]

mod error;
mod ram;
mod sim;
#[cfg(test)]
mod tests;
mod traffic;
mod uri;
mod uring;

use std::sync::Arc;

use uuid::Uuid;

pub use error::{DeviceError, IoError};
pub use sim::{SimDisks, SimFaults, SimSpec};
pub use traffic::Traffic;
pub use uri::DeviceUri;

use crate::memory::{DmaBuf, DmaSlice};
use crate::reactor::gate::Gate;

/// What stands behind a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceKind {
    Ram,
    /// See [`SimDisks`].
    Sim,
    Uring,
}

/// What is known about a device once it is open.
#[derive(Debug, Clone)]
pub struct DeviceInfo {
    /// The URI it was opened by.
    pub uri: String,
    /// A short name for people: the file's name, or `ram0`.
    pub name: String,
    pub kind: DeviceKind,
    /// Bytes per logical block: 512 or 4096.
    pub block_size: u32,
    /// Bytes in all, a multiple of the block size.
    pub size: u64,
    /// Acknowledged writes may be lost with the power until flushed.
    pub write_cache: bool,
    /// Aligned writes of this many bytes are not torn by a loss of power.
    pub atomic_bytes: u32,
    /// Identity of this open device; not stored on it.
    pub uuid: Uuid,
}

/// Choices made when opening a device that the URI does not carry.
#[derive(Debug, Clone, Default)]
pub struct OpenOptions {
    /// Refuse writes.
    pub read_only: bool,
}

/// An open device. Cheap to clone; usable from any reactor; closed when the last clone is dropped.
#[derive(Clone)]
pub struct Device {
    inner: Arc<Inner>,
}

struct Inner {
    info: DeviceInfo,
    read_only: bool,
    backing: Backing,
    counters: traffic::Counters,
    gate: Gate,
}

enum Backing {
    Ram(ram::Ram),
    Sim(sim::Sim),
    Uring(uring::Uring),
}

impl Device {
    /// Opens `ram:SIZE` or `uring:/path`, with options after `?`. Blocks; for the control thread.
    pub fn open(uri: &str, options: OpenOptions) -> Result<Device, DeviceError> {
        let parsed = DeviceUri::parse(uri)?;
        let (info, backing) = match parsed.scheme.as_str() {
            "ram" => {
                let (info, ram) = ram::open(&parsed)?;
                (info, Backing::Ram(ram))
            }
            "uring" => {
                let (info, uring) = uring::open(&parsed, options.read_only)?;
                (info, Backing::Uring(uring))
            }
            _ => return Err(DeviceError::UnknownKind { uri: uri.to_owned(), kind: parsed.scheme }),
        };
        Ok(Device::around(info, options.read_only, backing))
    }

    fn around(info: DeviceInfo, read_only: bool, backing: Backing) -> Device {
        let counters = traffic::Counters::default();
        let gate = Gate::default();
        Device { inner: Arc::new(Inner { info, read_only, backing, counters, gate }) }
    }

    /// A ram device that begins with these contents; the length must be a multiple of `block_size`.
    pub fn ram_from_image(image: &[u8], block_size: u32) -> Result<Device, DeviceError> {
        let (info, ram) = ram::from_image(image, block_size)?;
        Ok(Device::around(info, false, Backing::Ram(ram)))
    }

    /// A copy of a ram device's contents now; `None` for the other kinds.
    pub fn image(&self) -> Option<Vec<u8>> {
        match &self.inner.backing {
            Backing::Ram(ram) => Some(ram.image()),
            Backing::Sim(_) | Backing::Uring(_) => None,
        }
    }

    /// Whether another handle of this open device is alive: until none is, the device is not closed.
    pub fn is_shared(&self) -> bool {
        Arc::strong_count(&self.inner) > 1
    }

    /// Makes a file behave as a block device does that cannot discard.
    #[cfg(test)]
    pub fn refuse_discards(&self) {
        if let Backing::Uring(uring) = &self.inner.backing {
            uring.refuse_discards();
        }
    }

    /// Whether [`Device::discard`] works, as far as is known: of some devices the first one tells.
    pub fn can_discard(&self) -> bool {
        match &self.inner.backing {
            Backing::Ram(_) | Backing::Sim(_) => true,
            Backing::Uring(uring) => uring.can_discard(),
        }
    }

    pub fn info(&self) -> &DeviceInfo {
        &self.inner.info
    }

    /// Passed by those who want others to find what they change unchanged while they look at it.
    pub fn gate(&self) -> &Gate {
        &self.inner.gate
    }

    /// What went to the device and came from it since it was opened.
    pub fn traffic(&self) -> Traffic {
        self.inner.counters.total()
    }

    /// Fills `buf` from `offset`. The buffer comes back in any case; after an error its contents are
    /// unspecified.
    pub async fn read(&self, offset: u64, mut buf: DmaBuf) -> (Result<(), IoError>, DmaBuf) {
        if let Err(error) = self.check(offset, buf.len() as u64) {
            return (Err(error), buf);
        }
        self.inner.counters.read(buf.len() as u64);
        match &self.inner.backing {
            Backing::Ram(ram) => {
                ram.read(offset, &mut buf);
                (Ok(()), buf)
            }
            Backing::Sim(sim) => sim.read(offset, buf).await,
            Backing::Uring(uring) => uring.read(offset, buf).await,
        }
    }

    /// Writes `data` at `offset`.
    pub async fn write(&self, offset: u64, data: DmaSlice) -> Result<(), IoError> {
        self.check_write(offset, data.len() as u64)?;
        self.inner.counters.write(data.len() as u64);
        match &self.inner.backing {
            Backing::Ram(ram) => {
                ram.write(offset, &data);
                Ok(())
            }
            Backing::Sim(sim) => sim.write(offset, data).await,
            Backing::Uring(uring) => uring.write(offset, data).await,
        }
    }

    /// Writes the concatenation of `data` at `offset`; each part's length is a multiple of the block size.
    pub async fn write_vectored(&self, offset: u64, data: Vec<DmaSlice>) -> Result<(), IoError> {
        let len = data.iter().map(|part| part.len() as u64).sum();
        self.check_write(offset, len)?;
        self.inner.counters.write(len);
        match &self.inner.backing {
            Backing::Ram(ram) => {
                let mut at = offset;
                for part in &data {
                    ram.write(at, part);
                    at += part.len() as u64;
                }
                Ok(())
            }
            Backing::Sim(sim) => {
                let mut at = offset;
                for part in data {
                    let len = part.len() as u64;
                    sim.write(at, part).await?;
                    at += len;
                }
                Ok(())
            }
            Backing::Uring(uring) => uring.write_vectored(offset, data).await,
        }
    }

    /// Makes everything acknowledged before this call durable.
    pub async fn flush(&self) -> Result<(), IoError> {
        self.inner.counters.flush();
        match &self.inner.backing {
            Backing::Ram(_) => Ok(()),
            Backing::Sim(sim) => sim.flush().await,
            Backing::Uring(uring) => uring.flush().await,
        }
    }

    /// Gives the space of the range back; it reads as zeros afterwards. `Unsupported` where a block device
    /// cannot do both.
    pub async fn discard(&self, offset: u64, len: u64) -> Result<(), IoError> {
        self.check_write(offset, len)?;
        self.inner.counters.discard(len);
        match &self.inner.backing {
            Backing::Ram(ram) => {
                ram.zero(offset, len);
                Ok(())
            }
            Backing::Sim(sim) => sim.zero(offset, len).await,
            Backing::Uring(uring) => uring.discard(offset, len).await,
        }
    }

    /// Makes the range read as zeros.
    pub async fn write_zeroes(&self, offset: u64, len: u64) -> Result<(), IoError> {
        self.check_write(offset, len)?;
        self.inner.counters.discard(len);
        match &self.inner.backing {
            Backing::Ram(ram) => {
                ram.zero(offset, len);
                Ok(())
            }
            Backing::Sim(sim) => sim.zero(offset, len).await,
            Backing::Uring(uring) => uring.write_zeroes(offset, len).await,
        }
    }

    fn check(&self, offset: u64, len: u64) -> Result<(), IoError> {
        let info = &self.inner.info;
        let unit = u64::from(info.block_size);
        let fits = offset.checked_add(len).is_some_and(|end| end <= info.size);
        match fits && offset.is_multiple_of(unit) && len.is_multiple_of(unit) {
            true => Ok(()),
            false => Err(IoError::OutOfRange),
        }
    }

    fn check_write(&self, offset: u64, len: u64) -> Result<(), IoError> {
        if self.inner.read_only {
            return Err(IoError::WriteProtected);
        }
        self.check(offset, len)
    }
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Device").field(&self.inner.info.uri).finish()
    }
}
