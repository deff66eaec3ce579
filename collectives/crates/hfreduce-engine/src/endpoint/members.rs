//! The list of members: checked, as a number and in words.

use super::home::Origin;
use super::info::{Info, digest};

/// Who belongs to the next epoch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Member {
    /// A rank of the present one.
    Rank(u32),
    /// Somebody new: what [`Newcomer::info`] said.
    Newcomer(Vec<u8>),
}

/// The infos of the members, checked.
pub(super) fn list(origin: &Origin, members: &[Member]) -> Result<Vec<Info>, String> {
    let mut list: Vec<Info> = Vec::with_capacity(members.len());
    for member in members {
        let info = match member {
            Member::Rank(rank) => {
                let ranks = origin.infos.len();
                origin.infos.get(*rank as usize).cloned().ok_or_else(|| {
                    format!("rank {rank} does not exist in an epoch of {ranks} ranks")
                })?
            }
            Member::Newcomer(bytes) => serde_json::from_slice(bytes)
                .map_err(|error| format!("a newcomer's info cannot be read: {error}"))?,
        };
        if list.iter().any(|other| other.id == info.id) {
            return Err(format!("{member:?} is in the list twice"));
        }
        list.push(info);
    }
    match members.first() {
        Some(Member::Rank(_)) => Ok(list),
        _ => Err("the first member must be a rank of the present epoch".into()),
    }
}

/// The list for messages.
pub(super) fn words(members: &[Member], list: &[Info]) -> String {
    let named = members.iter().zip(list).take(32).map(|(member, info)| match member {
        Member::Rank(rank) => rank.to_string(),
        Member::Newcomer(_) => format!("a newcomer on {}", info.node),
    });
    let more = if members.len() > 32 { ", …" } else { "" };
    format!("[{}{more}]", named.collect::<Vec<_>>().join(", "))
}

/// Equal for equal lists.
pub(super) fn roster(list: &[Info]) -> u64 {
    digest(&list.iter().flat_map(|info| info.id.to_le_bytes()).collect::<Vec<_>>())
}
