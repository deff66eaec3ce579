# Generated from the verbs by `python -m flyer.cli.completion`.
_flyer() {
    local current="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD-1]}" words=""
    case "$previous" in
        -o|--output) words="table wide json yaml" ;;
        --state|--cluster|--kubeconfig) COMPREPLY=($(compgen -f -- "$current")); return ;;
    esac
    if [[ -n "$words" ]]; then
        COMPREPLY=($(compgen -W "$words" -- "$current"))
        return
    fi
    if [[ $COMP_CWORD -eq 1 ]]; then
        COMPREPLY=($(compgen -W "completion logs nodes priority ps queues quotas requeue resume run show stop suspend top why" -- "$current"))
        return
    fi
    case "${COMP_WORDS[1]}" in
        completion) words="-h --help" ;;
        logs) words="-f --follow --rank --attempt --tail --failed -o --output -n --namespace -A --all-namespaces --state --kube --context --kubeconfig -h --help" ;;
        nodes) words="-o --output -n --namespace -A --all-namespaces --state --kube --context --kubeconfig -h --help" ;;
        priority) words="-o --output -n --namespace -A --all-namespaces --state --kube --context --kubeconfig -h --help" ;;
        ps) words="-w --watch -o --output -n --namespace -A --all-namespaces --state --kube --context --kubeconfig -h --help" ;;
        queues) words="-o --output -n --namespace -A --all-namespaces --state --kube --context --kubeconfig -h --help" ;;
        quotas) words="-o --output -n --namespace -A --all-namespaces --state --kube --context --kubeconfig -h --help" ;;
        requeue) words="--reason -o --output -n --namespace -A --all-namespaces --state --kube --context --kubeconfig -h --help" ;;
        resume) words="-o --output -n --namespace -A --all-namespaces --state --kube --context --kubeconfig -h --help" ;;
        run) words="--cluster --preload --logs --keep --detach -o --output -n --namespace -A --all-namespaces --state --kube --context --kubeconfig -h --help" ;;
        show) words="-o --output -n --namespace -A --all-namespaces --state --kube --context --kubeconfig -h --help" ;;
        stop) words="--reason --now -o --output -n --namespace -A --all-namespaces --state --kube --context --kubeconfig -h --help" ;;
        suspend) words="--reason --wait --no-wait --timeout -o --output -n --namespace -A --all-namespaces --state --kube --context --kubeconfig -h --help" ;;
        top) words="-w --watch --interval -o --output -n --namespace -A --all-namespaces --state --kube --context --kubeconfig -h --help" ;;
        why) words="-o --output -n --namespace -A --all-namespaces --state --kube --context --kubeconfig -h --help" ;;
    esac
    if [[ "$current" == -* ]]; then
        COMPREPLY=($(compgen -W "$words" -- "$current"))
    elif [[ "${COMP_WORDS[1]}" == run ]]; then
        COMPREPLY=($(compgen -f -X '!*.y*ml' -- "$current") $(compgen -d -- "$current"))
    fi
}
complete -o filenames -F _flyer flyer
