//! The two copies of metadata: reading one or both, and writing a damaged one again.
#![forbid(unsafe_code)]

use super::pointer::{BLOCK_BYTES, Block, Pointer};
use super::shard::Shard;
use crate::device::{Device, IoError};
use crate::memory::DmaBuf;

/// Whole blocks from byte `offset`; zeroes stand for those that the device cannot read. No checksum fits them, so whoever
/// looks at them turns to the other copy, as with any other damage.
pub(super) async fn read(device: &Device, offset: u64, len: usize) -> DmaBuf {
    let (result, mut buf) = device.read(offset, DmaBuf::uninit(len)).await;
    let Err(error) = result else { return buf };
    tracing::warn!(device = %device.info().uri, offset, len, %error, "metadata cannot be read; block by block now");
    for (i, out) in buf.chunks_exact_mut(BLOCK_BYTES).enumerate() {
        let at = offset + (i * BLOCK_BYTES) as u64;
        match device.read(at, DmaBuf::uninit(BLOCK_BYTES)).await {
            (Ok(()), block) => out.copy_from_slice(&block),
            (Err(_), _) => out.fill(0),
        }
    }
    buf
}

impl Shard {
    /// Whether every device can be read from at all, by the blocks of its two labels.
    pub(super) async fn devices_answer(&self) -> Result<(), IoError> {
        for device in self.devices.iter() {
            let mut failure = None;
            for block in [0, self.geometry.last_block()] {
                let offset = block * BLOCK_BYTES as u64;
                failure = device.read(offset, DmaBuf::uninit(BLOCK_BYTES)).await.0.err();
                if failure.is_none() {
                    break;
                }
            }
            failure.map_or(Ok(()), Err)?;
        }
        Ok(())
    }

    /// What is in each copy of a metadata block; `None` for one that there is not, or that cannot be read.
    pub(super) async fn read_copies(&self, copies: [Option<Block>; 2]) -> Vec<Option<DmaBuf>> {
        let read = |block: Option<Block>| async move {
            let block = block?;
            let device = self.device(block).ok()?;
            let (result, bytes) = device.read(block.offset(), DmaBuf::uninit(BLOCK_BYTES)).await;
            result.ok().map(|()| bytes)
        };
        super::join::all(copies.into_iter().map(read)).await
    }

    /// Writes a damaged copy again. True when what is read back fits.
    pub(super) async fn rewrite(&self, block: Block, good: &[u8], crc: u32) -> bool {
        let Ok(device) = self.device(block) else { return false };
        if device.write(block.offset(), DmaBuf::copy_of(good).freeze()).await.is_err() {
            return false;
        }
        let (result, bytes) = device.read(block.offset(), DmaBuf::uninit(BLOCK_BYTES)).await;
        result.is_ok() && crate::crc32c::crc32c(&bytes) == crc
    }

    /// The page that a pointer leads to, if it happens to be in memory.
    pub(super) fn page_in_memory(&self, pointer: Pointer) -> Option<DmaBuf> {
        use zerocopy::IntoBytes;
        let mut state = self.state.borrow_mut();
        let frame = state.pages.find(pointer.block())?;
        let page = state.pages.page(frame);
        (page.crc() == pointer.crc()).then(|| DmaBuf::copy_of(page.as_bytes()))
    }

    /// The blocks of data that cannot be read or do not fit their checksums, by their place in the list, and why.
    /// What lies side by side is read at once.
    pub(super) async fn bad_blocks(&self, pointers: &[Pointer]) -> Vec<(usize, &'static str)> {
        /// The longest single read, in blocks.
        const RUN_BLOCKS: usize = 64;
        let mut bad = Vec::new();
        let mut at = 0;
        while at < pointers.len() {
            let first = pointers[at].block();
            let mut count = 1;
            while count < RUN_BLOCKS
                && pointers
                    .get(at + count)
                    .is_some_and(|next| next.block().raw() == first.raw() + count as u64)
            {
                count += 1;
            }
            let run = &pointers[at..at + count];
            for (i, why) in self.bad_run(first, run).await {
                bad.push((at + i, why));
            }
            at += count;
            crate::reactor::yield_now().await;
        }
        bad
    }

    async fn bad_run(&self, first: Block, run: &[Pointer]) -> Vec<(usize, &'static str)> {
        let Ok(device) = self.device(first) else {
            return (0..run.len()).map(|i| (i, "lies on a device that is not there")).collect();
        };
        let (result, bytes) = device.read(first.offset(), DmaBuf::uninit(run.len() * BLOCK_BYTES)).await;
        if result.is_ok() {
            let blocks = bytes.chunks_exact(BLOCK_BYTES).zip(run).enumerate();
            let wrong = blocks.filter(|(_, (block, pointer))| crate::crc32c::crc32c(block) != pointer.crc());
            return wrong.map(|(i, _)| (i, "does not fit its checksum")).collect();
        }
        let mut bad = Vec::new();
        for (i, pointer) in run.iter().enumerate() {
            let (result, bytes) = device.read(pointer.block().offset(), DmaBuf::uninit(BLOCK_BYTES)).await;
            match result {
                Ok(()) if crate::crc32c::crc32c(&bytes) == pointer.crc() => {}
                Ok(()) => bad.push((i, "does not fit its checksum")),
                Err(_) => bad.push((i, "cannot be read")),
            }
        }
        bad
    }
}
