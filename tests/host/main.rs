//! The initiator against real targets: Rimrock's own, and SPDK's `nvmf_tgt` where it is installed (PATH, then $SPDK_BIN).

mod checks;
mod own;
#[path = "../skip/mod.rs"]
mod skip;
mod spdk;

#[test]
fn the_host_works_with_rimrock() {
    checks::all(&mut own::Own::start());
}

#[test]
fn the_host_works_with_spdk() {
    match spdk::Spdk::start() {
        Ok(mut spdk) => checks::all(&mut spdk),
        Err(why) => skip::skip("nvmf_tgt", &why),
    }
}
