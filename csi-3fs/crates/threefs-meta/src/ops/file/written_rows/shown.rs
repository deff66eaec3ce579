//! Rows of written chunks as a snapshot shows them, in their order.

use threefs_core::ids::InodeId;
use threefs_kv::{KeyRange, KvError, Transaction};

use super::{add_chunks, place_of_key, read};
use crate::ops::view;
use crate::protocol::WrittenCursor;
use crate::rows;
use crate::rows::history as keys;
use crate::written::Written;
use crate::written::page::PAGE_BITS;

/// As [`super::page_after`], of an inode of a snapshot: from the current pages and the former ones.
pub(super) async fn page_after(
    txn: &mut Transaction,
    inode: InodeId,
    after: Option<WrittenCursor>,
    pages_max: usize,
) -> Result<(Written, Option<WrittenCursor>), KvError> {
    let rows = rows::written_of(view::raw(inode));
    let (mut written, mut place) = (Written::default(), after);
    for _ in 0..pages_max {
        let mut next = None;
        for prefix in [rows.clone(), keys::former_page(&rows)] {
            let mut range = KeyRange::prefix(&prefix);
            if let Some(WrittenCursor { level, page }) = place {
                let last = [&prefix[..], &[level], &page.to_be_bytes()].concat();
                // Its former values have an epoch more.
                range.start = [&last[..], &[u8::MAX; 5]].concat();
            }
            if let Some((key, _)) = txn.snapshot_range(&range, 1).await?.first() {
                let found = place_of_key(key)?;
                let order = |place: WrittenCursor| (place.level, place.page);
                next = next.filter(|it| order(*it) < order(found)).or(Some(found));
            }
        }
        let Some(found) = next else { return Ok((written, None)) };
        let unit = u64::from(found.page) * PAGE_BITS;
        add_chunks(&mut written, found, &read(txn, inode, found.level, unit).await?);
        place = Some(found);
    }
    Ok((written, place))
}
