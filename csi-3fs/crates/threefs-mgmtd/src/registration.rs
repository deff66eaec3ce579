//! Registration of the metadata store of the cluster.
//!
//! A metadata service registers its store before it serves. An empty store, an old copy and a store
//! of another cluster are refused: inode numbers would be reused, and new files would show chunks
//! of files that the store does not know.

use serde::{Deserialize, Serialize};
use threefs_core::ids::{ClusterId, TreeId};

use crate::protocol::{Claim, MetaRegistration, MgmtdError};

/// The registered store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MetaRow {
    pub tree: TreeId,
    pub generation: u64,
    pub process: u128,
    pub adoptions: u32,
}

/// The row after a registration.
///
/// # Errors
/// The store does not belong to this cluster.
pub(crate) fn register(
    registered: Option<&MetaRow>,
    own_id: ClusterId,
    registration: &MetaRegistration,
) -> Result<MetaRow, MgmtdError> {
    let MetaRegistration { tree, generation, process, cluster, claim } = registration.clone();
    let adopted = claim == Claim::Adopted;
    if let Some(foreign_id) = cluster.filter(|foreign_id| *foreign_id != own_id && !adopted) {
        return Err(MgmtdError::TreeOfOtherCluster { tree, foreign_id, own_id });
    }
    let Some(registered) = registered else {
        return Ok(MetaRow { tree, generation, process, adoptions: u32::from(adopted) });
    };
    if registered.tree == tree && registered.process == process {
        return Ok(registered.clone());
    }
    let renewed = MetaRow { tree, generation, process, adoptions: registered.adoptions };
    match claim {
        Claim::Adopted => {
            let generation = generation.max(registered.generation + 1);
            Ok(MetaRow { generation, adoptions: registered.adoptions + 1, ..renewed })
        }
        _ if registered.tree != tree => {
            Err(MgmtdError::ForeignTree { foreign_id: tree, own_id: registered.tree })
        }
        Claim::Restored => {
            Ok(MetaRow { generation: generation.max(registered.generation + 1), ..renewed })
        }
        Claim::Continues if generation > registered.generation => Ok(renewed),
        Claim::Continues => {
            Err(MgmtdError::OldTree { tree, generation, newest: registered.generation })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OURS: ClusterId = ClusterId(1);

    fn store(tree: u128, generation: u64, claim: Claim) -> MetaRegistration {
        let (tree, process) = (TreeId(tree), u128::from(generation) * 1_000);
        MetaRegistration { tree, generation, process, cluster: Some(OURS), claim }
    }

    fn registered_row() -> MetaRow {
        MetaRow { tree: TreeId(5), generation: 7, process: 70, adoptions: 2 }
    }

    #[test]
    fn the_first_store_and_its_later_generations_are_accepted() {
        let first = MetaRegistration { cluster: None, ..store(5, 1, Claim::Continues) };
        let row = register(None, OURS, &first).unwrap();
        assert_eq!((row.tree, row.generation, row.adoptions), (TreeId(5), 1, 0));
        assert_eq!(register(Some(&row), OURS, &first).unwrap(), row, "a repeated request");
        let next = register(Some(&row), OURS, &store(5, 2, Claim::Continues)).unwrap();
        assert_eq!(next.generation, 2);
    }

    #[test]
    fn an_empty_store_and_an_old_copy_are_refused() {
        let empty = MetaRegistration { cluster: None, ..store(6, 1, Claim::Continues) };
        let error = register(Some(&registered_row()), OURS, &empty).unwrap_err();
        assert_eq!(error, MgmtdError::ForeignTree { foreign_id: TreeId(6), own_id: TreeId(5) });
        for generation in [1, 6, 7] {
            let copy = store(5, generation, Claim::Continues);
            let error = register(Some(&registered_row()), OURS, &copy).unwrap_err();
            assert_eq!(error, MgmtdError::OldTree { tree: TreeId(5), generation, newest: 7 });
        }
    }

    #[test]
    fn a_restored_dump_is_accepted_and_replaces_the_lost_store() {
        let row = register(Some(&registered_row()), OURS, &store(5, 3, Claim::Restored)).unwrap();
        assert_eq!((row.generation, row.adoptions), (8, 2));
        let old_copy = store(5, 8, Claim::Continues);
        assert!(register(Some(&row), OURS, &old_copy).is_err());
        let dump = store(6, 3, Claim::Restored);
        let error = register(Some(&registered_row()), OURS, &dump).unwrap_err();
        assert!(matches!(error, MgmtdError::ForeignTree { .. }), "{error}");
    }

    #[test]
    fn a_tree_of_another_cluster_is_accepted_only_if_adopted() {
        let foreign =
            |claim| MetaRegistration { cluster: Some(ClusterId(9)), ..store(6, 20, claim) };
        for registered in [None, Some(registered_row())] {
            for claim in [Claim::Continues, Claim::Restored] {
                let error = register(registered.as_ref(), OURS, &foreign(claim)).unwrap_err();
                assert!(matches!(error, MgmtdError::TreeOfOtherCluster { .. }), "{error}");
            }
        }
        let row = register(Some(&registered_row()), OURS, &foreign(Claim::Adopted)).unwrap();
        assert_eq!((row.tree, row.generation, row.adoptions), (TreeId(6), 20, 3));
        let again = register(Some(&row), OURS, &foreign(Claim::Adopted)).unwrap();
        assert_eq!(again, row, "a repeated request adopts once");
        assert_eq!(register(None, OURS, &foreign(Claim::Adopted)).unwrap().adoptions, 1);
    }
}
