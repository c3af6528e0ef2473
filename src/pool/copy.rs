//! Reading one of two copies of metadata.
#![forbid(unsafe_code)]

use super::pointer::BLOCK_BYTES;
use crate::device::Device;
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
