//! Namespaces: what a host sees as a disk, and what stands behind it.
//!
//! A [`Namespace`] is immutable but for its size, so that any queue on any reactor may use it without a lock. A subsystem
//! publishes its namespaces as one shared [`NamespaceMap`]; a change makes a new map and moves the subsystem's generation,
//! and each queue takes the new map over between two turns. A namespace that was removed lives until the last command that
//! uses it has ended, and not longer: whoever removed it waits for exactly that.
#![forbid(unsafe_code)]

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use uuid::Uuid;

use super::error::TargetError;
use super::flush::Flushes;
use super::spec::{NamespaceSpec, NamespaceView};
use crate::device::{Device, IoError};
use crate::memory::{DmaBuf, DmaSlice};
use crate::pool::Volume;
use crate::reactor;
use crate::reactor::gate::{Claim, Gate, Pass};

/// The unit in which volumes keep their data, bytes.
const VOLUME_BLOCK: u32 = 4096;

/// What is zeroed or deallocated of a device before other tasks have their turn, bytes.
const STEP_BYTES: u64 = 16 << 20;

/// What stands behind a namespace.
#[derive(Clone)]
pub enum Backend {
    /// A whole device, with the device's own block size.
    Device(Device),
    /// A volume or a snapshot of a pool, in blocks of 512 or 4096 bytes.
    Volume(Volume),
}

impl Backend {
    pub fn size(&self) -> u64 {
        match self {
            Backend::Device(device) => device.info().size,
            Backend::Volume(volume) => volume.size(),
        }
    }

    pub fn uuid(&self) -> Uuid {
        match self {
            Backend::Device(device) => device.info().uuid,
            Backend::Volume(volume) => volume.uuid(),
        }
    }

    /// The logical block size that suits the backend best.
    pub fn native_block_size(&self) -> u32 {
        match self {
            Backend::Device(device) => device.info().block_size,
            Backend::Volume(volume) => volume.block_size(),
        }
    }

    /// Acknowledged writes may be lost with the power until they are flushed.
    pub fn has_write_cache(&self) -> bool {
        match self {
            Backend::Device(device) => device.info().write_cache,
            Backend::Volume(volume) => volume.has_write_cache(),
        }
    }

    pub fn is_read_only(&self) -> bool {
        match self {
            Backend::Device(_) => false,
            Backend::Volume(volume) => volume.is_read_only(),
        }
    }

    /// Space is taken as it is written and given back by deallocation.
    pub fn is_thin(&self) -> bool {
        match self {
            Backend::Device(_) => false,
            Backend::Volume(_) => true,
        }
    }

    /// Deallocation does something: what is deallocated reads as zeros.
    pub fn can_deallocate(&self) -> bool {
        match self {
            Backend::Device(device) => device.can_discard(),
            Backend::Volume(_) => true,
        }
    }

    /// Bytes in use; for a thin backend less than its size.
    pub fn allocated(&self) -> u64 {
        match self {
            Backend::Device(device) => device.info().size,
            Backend::Volume(volume) => volume.allocated(),
        }
    }

    /// Aligned writes of this many bytes are not torn by a loss of power.
    pub fn atomic_bytes(&self) -> u32 {
        match self {
            Backend::Device(device) => device.info().atomic_bytes,
            // Redirected on write: the old block or the new one, never a mixture.
            Backend::Volume(_) => VOLUME_BLOCK,
        }
    }

    /// Bytes in which writing and deallocating works best.
    pub fn granularity(&self) -> u32 {
        match self {
            Backend::Device(device) => device.info().block_size.max(VOLUME_BLOCK),
            Backend::Volume(_) => VOLUME_BLOCK,
        }
    }

    /// Writes are done from memory of any alignment, at once: their data need not be moved out of the receive buffer.
    pub fn takes_any_memory(&self) -> bool {
        match self {
            Backend::Device(device) => device.info().kind == crate::device::DeviceKind::Ram,
            Backend::Volume(_) => false,
        }
    }

    /// What every change of the backend's data passes, whoever exports it.
    fn gate(&self) -> &Gate {
        match self {
            Backend::Device(device) => device.gate(),
            Backend::Volume(volume) => volume.gate(),
        }
    }

    fn check_block_size(&self, block_size: u32) -> Result<(), TargetError> {
        let refuse = |why: String| Err(TargetError::BlockSize { block_size, why });
        if !matches!(block_size, 512 | 4096) {
            return refuse("it must be 512 or 4096".into());
        }
        match self {
            Backend::Device(device) if device.info().block_size != block_size => refuse(format!(
                "device {} has blocks of {} bytes",
                device.info().uri,
                device.info().block_size
            )),
            Backend::Device(_) | Backend::Volume(_) => Ok(()),
        }
    }

    /// Reads `buf.len()` bytes.
    pub async fn read(&self, offset: u64, buf: DmaBuf) -> (Result<(), IoError>, DmaBuf) {
        match self {
            Backend::Device(device) => device.read(offset, buf).await,
            Backend::Volume(volume) => volume.read(offset, buf).await,
        }
    }

    async fn flush(&self) -> Result<(), IoError> {
        match self {
            Backend::Device(device) => device.flush().await,
            Backend::Volume(volume) => volume.flush().await,
        }
    }

    /// Gives the space of the range back, as far as the backend can: it is the host's hint, so that it cannot is no error.
    pub async fn deallocate(&self, offset: u64, len: u64) -> Result<(), IoError> {
        match self {
            Backend::Device(device) => match in_steps(offset, len, |at, len| device.discard(at, len)).await {
                Err(IoError::Unsupported) => Ok(()),
                result => result,
            },
            Backend::Volume(volume) => volume.deallocate(offset, len).await,
        }
    }
}

/// Zeroes a range of a device. Discarded ranges read as zeros wherever a device can discard.
async fn zero(device: &Device, offset: u64, len: u64, deallocate: bool) -> Result<(), IoError> {
    if deallocate {
        match device.discard(offset, len).await {
            Err(IoError::Unsupported) => {}
            result => return result,
        }
    }
    device.write_zeroes(offset, len).await
}

/// Does `work` on the range a step at a time. Other tasks run in between: what a device does at once, as memory does,
/// takes the time of its reactor.
async fn in_steps<F>(offset: u64, len: u64, work: impl Fn(u64, u64) -> F) -> Result<(), IoError>
where
    F: Future<Output = Result<(), IoError>>,
{
    let mut done = 0;
    while done < len {
        let step = (len - done).min(STEP_BYTES);
        work(offset + done, step).await?;
        done += step;
        if done < len {
            reactor::yield_now().await;
        }
    }
    Ok(())
}

impl fmt::Debug for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Backend::Device(device) => device.fmt(f),
            Backend::Volume(volume) => f.debug_tuple("Volume").field(&volume.name()).finish(),
        }
    }
}

/// One namespace of a subsystem.
pub struct Namespace {
    pub nsid: u32,
    pub bdev_name: String,
    pub backend: Backend,
    pub uuid: Uuid,
    pub nguid: [u8; 16],
    pub eui64: Option<[u8; 8]>,
    /// Bytes of a logical block as a power of two: 9 or 12.
    pub block_shift: u32,
    pub read_only: bool,
    /// ANAGRPID: it has the access state of this group.
    pub ana_group: u32,
    /// Size in logical blocks; changes when the backend is resized.
    blocks: AtomicU64,
    flushes: Flushes,
}

impl Namespace {
    /// Checks what `spec` says about the namespace itself; the subsystem checks NSID and identities.
    pub(super) fn new(nsid: u32, spec: NamespaceSpec) -> Result<Namespace, TargetError> {
        spec.backend.check_block_size(spec.block_size)?;
        let size = spec.backend.size();
        let blocks = size / u64::from(spec.block_size);
        if blocks == 0 {
            return Err(TargetError::Size { size, why: "it has not a single block".into() });
        }
        let uuid = spec.uuid.unwrap_or_else(|| spec.backend.uuid());
        Ok(Namespace {
            nsid,
            bdev_name: spec.bdev_name,
            uuid,
            nguid: spec.nguid.unwrap_or_else(|| uuid.into_bytes()),
            eui64: spec.eui64,
            block_shift: spec.block_size.trailing_zeros(),
            read_only: spec.read_only || spec.backend.is_read_only(),
            // A group of its own, unless asked for otherwise.
            ana_group: spec.ana_group.unwrap_or(nsid),
            blocks: AtomicU64::new(blocks),
            flushes: Flushes::default(),
            backend: spec.backend,
        })
    }

    pub fn block_size(&self) -> u32 {
        1 << self.block_shift
    }

    /// Size in logical blocks.
    pub fn blocks(&self) -> u64 {
        self.blocks.load(Ordering::Relaxed)
    }

    /// Takes the backend's size over; true if it has changed.
    pub(super) fn resize(&self) -> bool {
        let blocks = self.backend.size() >> self.block_shift;
        self.blocks.swap(blocks, Ordering::Relaxed) != blocks
    }

    /// The bytes of `blocks` logical blocks from `slba`, if all of them exist. 64-bit sums: both are the host's.
    pub fn byte_range(&self, slba: u64, blocks: u64) -> Option<(u64, u64)> {
        let end = slba.checked_add(blocks)?;
        (end <= self.blocks()).then(|| (slba << self.block_shift, blocks << self.block_shift))
    }

    /// Waits until nobody has claimed a part of the range. It can be changed for as long as the result lives.
    pub async fn pass(&self, offset: u64, len: u64) -> Pass<'_> {
        let gate = self.backend.gate();
        match gate.try_pass() {
            Some(pass) => pass,
            // Seldom, and large for what every write has room for.
            None => Box::pin(gate.pass(offset..offset + len)).await,
        }
    }

    /// Waits until nobody else changes the range. Nobody does for as long as the result lives.
    pub async fn claim(&self, offset: u64, len: u64) -> Claim<'_> {
        self.backend.gate().claim(offset..offset + len).await
    }

    /// Writes `data`; with `fua` it is durable when this returns.
    pub async fn write(&self, offset: u64, data: DmaSlice, fua: bool) -> Result<(), IoError> {
        match &self.backend {
            Backend::Device(device) => {
                device.write(offset, data).await?;
                self.settle(device, fua).await
            }
            Backend::Volume(volume) => volume.write(offset, data, fua).await,
        }
    }

    /// Makes everything acknowledged before this call durable.
    pub async fn flush(&self) -> Result<(), IoError> {
        self.flushes.run(|| self.backend.flush()).await
    }

    /// Makes the range read as zeros. `deallocate` allows the space to be given back, `fua` asks for durability.
    pub async fn write_zeroes(
        &self,
        offset: u64,
        len: u64,
        deallocate: bool,
        fua: bool,
    ) -> Result<(), IoError> {
        match &self.backend {
            Backend::Device(device) => {
                in_steps(offset, len, |at, len| zero(device, at, len, deallocate)).await?;
                self.settle(device, fua).await
            }
            // A volume keeps no zeros: the space is given back in any case.
            Backend::Volume(volume) => volume.write_zeroes(offset, len, fua).await,
        }
    }

    async fn settle(&self, device: &Device, fua: bool) -> Result<(), IoError> {
        if fua && device.info().write_cache { self.flush().await } else { Ok(()) }
    }

    pub(super) fn view(&self) -> NamespaceView {
        NamespaceView {
            nsid: self.nsid,
            bdev_name: self.bdev_name.clone(),
            uuid: self.uuid,
            nguid: self.nguid,
            eui64: self.eui64,
            block_size: self.block_size(),
            blocks: self.blocks(),
            read_only: self.read_only,
            ana_group: self.ana_group,
            flushes: self.flushes.done(),
        }
    }
}

/// The namespaces of a subsystem at one moment.
#[derive(Clone, Default)]
pub struct NamespaceMap {
    /// By NSID - 1, no longer than the highest NSID in use.
    slots: Vec<Option<Arc<Namespace>>>,
}

impl NamespaceMap {
    pub fn get(&self, nsid: u32) -> Option<&Arc<Namespace>> {
        self.slots.get(nsid.checked_sub(1)? as usize)?.as_ref()
    }

    /// In rising order of NSID.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<Namespace>> {
        self.slots.iter().flatten()
    }

    /// One past the highest NSID in use, less one: how many slots there are to look at.
    pub fn highest_nsid(&self) -> u32 {
        self.slots.len() as u32
    }

    /// The lowest NSID that is free, which may be beyond what the subsystem allows.
    pub(super) fn lowest_free(&self) -> u32 {
        self.slots.iter().position(Option::is_none).unwrap_or(self.slots.len()) as u32 + 1
    }

    pub(super) fn insert(&mut self, namespace: Arc<Namespace>) {
        let index = namespace.nsid as usize - 1;
        if self.slots.len() <= index {
            self.slots.resize(index + 1, None);
        }
        self.slots[index] = Some(namespace);
    }

    pub(super) fn remove(&mut self, nsid: u32) -> Option<Arc<Namespace>> {
        let removed = self.slots.get_mut(nsid.checked_sub(1)? as usize)?.take();
        while self.slots.last().is_some_and(Option::is_none) {
            self.slots.pop();
        }
        removed
    }
}

#[cfg(test)]
mod tests {
    use super::super::identify;
    use super::*;
    use crate::device::OpenOptions;
    use crate::reactor::{ReactorConfig, Reactors, block_on};

    #[test]
    fn a_device_that_cannot_discard_takes_the_hint_and_still_zeroes() {
        let exe = std::env::current_exe().expect("tests have a path");
        let dir = tempfile::tempdir_in(exe.parent().expect("it is in a directory")).expect("it is writable");
        let uri = format!("uring:{}/disk?size=64MiB", dir.path().display());
        let device = Device::open(&uri, OpenOptions::default()).expect("a file");
        device.refuse_discards();
        let reactors = Reactors::start(ReactorConfig::default()).expect("a reactor starts");
        let work = move || async move {
            let spec = NamespaceSpec::new(Backend::Device(device.clone()), "disk");
            let namespace = Namespace::new(1, spec).expect("a namespace");
            namespace.write(0, DmaSlice::copy_of(&[7; 8192]), false).await?;
            namespace.backend.deallocate(0, 4096).await?;
            namespace.write_zeroes(4096, (64 << 20) - 4096, true, false).await?;
            let id = identify::describe(&namespace);
            assert_eq!((id.dlfeat, id.npdg.get(), id.npda.get()), (0, 0, 0));
            let (result, buf) = namespace.backend.read(0, DmaBuf::uninit(8192)).await;
            result.map(|()| (buf[..4096].iter().all(|&b| b == 7), buf[4096..].iter().all(|&b| b == 0)))
        };
        let found = block_on(reactors.handles()[0].call(work)).expect("the reactor lives");
        assert_eq!(found.expect("no step fails"), (true, true));
    }
}
