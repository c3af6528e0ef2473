//! Reading, writing and the other I/O commands.

use crate::client::*;

#[test]
fn what_is_written_is_read_back_at_every_size() {
    let rig = Rig::start();
    let (_admin, mut io) = rig.connect();
    for (i, len) in [4096, 8192, 12288, 65536, 131_072, 135_168, 1 << 20].into_iter().enumerate() {
        let data = pattern(len, i as u8);
        assert!(io.write(1, i as u64 * 256, &data).ok(), "{len}");
        assert_eq!(io.read(1, i as u64 * 256, len as u32).expect_ok(), data, "{len}");
    }
    rig.check_health();
}
